"""Sampling parameters by row, and sampling from logits on the host."""
