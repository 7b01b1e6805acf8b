"""Packed weights on disk: keyed by the checkpoint, the kernels and the code; checked when they are read."""
