"""Continuous batching on paged KV memory: tokens in, tokens out."""
