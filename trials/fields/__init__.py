"""Sends every field of the chat and completions APIs to a running server: each has its effect, or is refused."""
