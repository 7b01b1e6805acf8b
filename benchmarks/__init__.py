"""Our engine and its peers on the same machine, checkpoints and requests, in one run. See docs/benchmarks.md.

`python -m benchmarks` runs the suite; `make bench` installs what it needs first.
"""
