"""The web pages: a process of its own that speaks to the server over its public HTTP API alone. Begin with main.py."""
