"""The metrics page: Triton's nv_* families, families of backends, and latencies."""
