"""The parts of benchmarks/gpu.py: each a program of its own, so that one that fails or hangs spoils no other."""
