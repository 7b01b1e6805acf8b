"""What runs in a stub process: the model, its `pb_utils`, and the link to the host.

For: models; the host imports packets.py and the packed types of requests, responses and tensors, so that both ends
agree. Does not know: the host's packages. Invariant: imports the standard library and numpy (ml_dtypes where it is
installed) alone, and this package by relative imports, because the interpreter may be another one: Python 3.10 or
newer.
"""
