"""Worker threads and processes that parse and print large bodies, apart from the event loop."""
