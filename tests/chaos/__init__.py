"""Chaos, soak, overload, idle: faults injected into a real server over real sockets. `python -m tests.chaos --help`."""
