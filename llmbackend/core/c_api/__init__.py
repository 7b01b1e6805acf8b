"""Compiled backends: Triton's C API over the host's contract (backend_api.py), and the backends' shared libraries."""
