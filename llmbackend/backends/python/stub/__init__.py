"""What runs in a stub process: the model, its `pb_utils`, and the link to the host.

For: models; the host imports `packets` and `tensor_wire` of it, so that both ends speak the same. Does not know: the
host's packages. Invariant: imports nothing beyond the standard library and numpy (ml_dtypes where it is there), by
relative imports alone, because the process may be one of another interpreter: Python 3.10 or newer.
"""
