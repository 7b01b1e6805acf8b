"""The `python` backend: runs a Triton `model.py` unchanged, in the host's process."""
