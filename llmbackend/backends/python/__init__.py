"""The `python` backend: runs a Triton `model.py` unchanged, each instance in a process of its own (the stub)."""
