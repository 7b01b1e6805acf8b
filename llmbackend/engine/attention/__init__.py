"""Attention over paged keys and values: the interface to `transformers`, the ragged layout of a step, the backends."""
