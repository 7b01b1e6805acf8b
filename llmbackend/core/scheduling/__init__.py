"""Schedulers: which requests an instance executes next."""
