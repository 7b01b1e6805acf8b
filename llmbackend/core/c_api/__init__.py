"""Compiled backends: Triton's C API on top of the host's contract (backend_api.py), and their shared libraries."""
