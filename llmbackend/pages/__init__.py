"""The web pages: a separate process that uses only the server's public HTTP API. Begin with main.py."""
