"""Launches of the sampling kernels for a real vocabulary, to be compiled: see compile_kernels.py."""

from __future__ import annotations

import torch

from llmbackend.engine.gpu.device_sampler import DeviceSampler


def launch_sampling(_capability: int) -> None:
    DeviceSampler(64, 151936, (2,), "cpu").compile(torch.bfloat16, 4096)
