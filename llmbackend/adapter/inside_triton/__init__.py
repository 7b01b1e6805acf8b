"""The adapter inside NVIDIA's Triton: the backend contract implemented on pb_utils, and its installation."""
