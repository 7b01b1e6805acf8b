"""Servers beside servers: ours and its peers' under one outside load generator; see docs/benchmarks.md."""
