"""Chaos, soak, overload and idle: a real server over real sockets, hurt on purpose. `python -m tests.chaos --help`."""
