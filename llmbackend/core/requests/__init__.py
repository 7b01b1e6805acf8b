"""One request's way through the host and back: its checks, its responses, and its end."""
