"""Every field of the chat and completions APIs, sent to a running server: it does what it promises, or is refused."""
