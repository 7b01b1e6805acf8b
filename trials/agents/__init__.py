"""Coding agents against the real server, with a model whose entire output is scripted."""
