"""A server process: start, announce, drain, end."""
