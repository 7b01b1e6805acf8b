"""Launches of the product by weights of 4 bits, in shapes of real models, to be compiled: see compile_kernels.py."""

from __future__ import annotations

import torch

from llmbackend.engine.gpu.kernels.matmul import int4_matmul
from llmbackend.engine.gpu.weights.int4 import Int4Weight

ROWS = (1, 17, 65, 257)
"""One of each kind of tile."""


def launch_int4(_capability: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for exact in (False, True):
            for num_rows in ROWS:
                _multiply(num_rows, 128, True, dtype, exact)
    _multiply(1, 32, False, torch.bfloat16, False)
    _multiply(257, 32, True, torch.bfloat16, False)


def launch_int4_of_many_rows(_capability: int) -> None:
    _multiply(ROWS[-1], 128, True, torch.bfloat16, False)


def _multiply(num_rows: int, group_size: int, has_zero: bool, dtype: torch.dtype, exact: bool) -> None:
    n, k = 64, 4096
    groups = torch.zeros(n, k // group_size, dtype=torch.float16)
    zero = groups.to(torch.uint8) if has_zero else None
    weight = Int4Weight.of(torch.zeros(n, k, dtype=torch.uint8), groups, zero, group_size)
    x, bias, out = (torch.zeros(*shape, dtype=dtype) for shape in ((num_rows, k), (n,), (num_rows, n)))
    int4_matmul(x, weight.data, weight.scale, weight.zero, group_size, weight.slab, bias, out, exact)
