"""Packed weights on disk, keyed by checkpoint, kernels and code, and verified when read."""
