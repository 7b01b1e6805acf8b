"""Chaos, soak, overload, idle: faults injected into a real server. `python -m trials.chaos --help`."""
