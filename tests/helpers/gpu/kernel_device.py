"""Where tests run kernels: in Triton's interpreter, or on the GPU that LLMBACKEND_TEST_DEVICE names, as
benchmarks/gpu.py does."""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(os.environ.get("LLMBACKEND_TEST_DEVICE", "cpu"))
INTERPRETED = DEVICE.type == "cpu"
"""On a GPU there is time for real sizes and thousands of rows."""
