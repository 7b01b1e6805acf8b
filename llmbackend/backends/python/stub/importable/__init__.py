"""A folder of sys.path: what model.py imports in worker processes that a model starts with `spawn` or `forkserver`.

In the model's own process and its forks these modules are loaded already.
"""
