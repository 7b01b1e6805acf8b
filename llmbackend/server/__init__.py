"""A server process: startup, readiness announcement, drain, shutdown."""
