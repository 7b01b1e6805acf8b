"""Launches of the kernels for rows in 8 bits, in the shapes of real models, to be compiled: see compile_kernels.py."""

from __future__ import annotations

import torch

from llmbackend.engine.gpu.kernels.matmul import scaled_matmul
from llmbackend.engine.gpu.ops.ops import Norm
from llmbackend.engine.gpu.ops.triton_ops import TritonOps
from llmbackend.engine.gpu.weights.dense import FP8, EightBitRows

BF16 = torch.bfloat16


def launch_eight_bits(_capability: int) -> None:
    _launch(FP8)
    _launch(torch.int8)


def launch_whole_numbers(_capability: int) -> None:
    _launch(torch.int8)


def _launch(kind: torch.dtype) -> None:
    for width in (896, 8192):
        rows = EightBitRows(torch.zeros(2, width, dtype=torch.uint8).view(kind), torch.zeros(2, 1))
        ops, norm = TritonOps(), Norm(torch.zeros(width), 1e-5)
        residual, block = torch.zeros(2, width), torch.zeros(2, width, dtype=BF16)
        ops.residual_norm(residual, block, None, 1.0, norm, rows)
        ops.gate(torch.zeros(2, 2 * width, dtype=BF16), "silu", rows)
        ops.quantize(block, rows)
    for num_rows in (1, 256, 1024):
        _multiply(num_rows, kind)


def _multiply(num_rows: int, kind: torch.dtype) -> None:
    n, k = 64, 4096
    x, weight = (torch.zeros(rows, k, dtype=torch.uint8).view(kind) for rows in (num_rows, n))
    bias, out = torch.zeros(n, dtype=BF16), torch.zeros(num_rows, n, dtype=BF16)
    scaled_matmul(x, torch.zeros(num_rows, 1), weight, torch.zeros(n), bias, out)
