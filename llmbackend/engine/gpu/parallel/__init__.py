"""Tensor parallelism: one engine over several devices of a host, a process for each."""
