"""The web pages: a separate process that uses only the server's public HTTP API. Entry point: main.py."""
