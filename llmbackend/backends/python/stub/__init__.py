"""The code of a stub process: the model, its `pb_utils`, and the link to the host.

Imports only the standard library, numpy, ml_dtypes if installed, and this package (by relative imports), because it may
run in another interpreter (Python 3.10 or newer). The host imports packets.py and the packed types.
"""
