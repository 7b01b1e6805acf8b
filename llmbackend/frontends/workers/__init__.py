"""Processes that parse and print large bodies, so that the interpreter's lock of the server is not held meanwhile."""
