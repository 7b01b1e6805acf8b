"""The parts of benchmarks/gpu.py: each a program of its own, so that a failure or hang does not affect the others."""
