"""Compares servers: ours and its peers', under the same external load generator; see docs/benchmarks.md."""
