"""Attention over paged keys and values: the interface to `transformers`, and its implementations in torch and on native
kernels."""
