"""Hostile input on every interface: HTTP, gRPC, model configurations, engine arguments. `python -m trials.fuzz
--help`."""
