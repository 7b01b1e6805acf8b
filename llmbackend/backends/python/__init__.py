"""The `python` backend: runs a Triton `model.py` unchanged, each instance in its own process (the stub)."""
