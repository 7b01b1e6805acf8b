"""Weights in device memory, by their formats."""
