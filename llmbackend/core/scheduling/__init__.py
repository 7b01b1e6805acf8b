"""Schedulers, which decide what requests an instance executes next."""
