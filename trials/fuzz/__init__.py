"""Hostile input on every way in: HTTP, gRPC, model configurations, engine arguments. `python -m trials.fuzz --help`."""
