"""Coding agents against the real server, with a model whose every word is scripted."""
