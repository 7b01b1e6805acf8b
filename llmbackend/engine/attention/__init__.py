"""Attention over paged keys and values: the interface to `transformers`, computed in torch and by native kernels."""
