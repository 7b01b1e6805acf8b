"""Tensor and pipeline parallelism: one engine over several devices, with a process for each."""
