"""What kernels need to say differently to Triton's interpreter than to its compiler, and for which hardware."""

from __future__ import annotations

import torch
import triton.language as tl
from triton import knobs
from triton.runtime import driver

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """In what type the operands of matrix products go in, for a model of this type. The interpreter multiplies the bits
    of bfloat16 numbers as integers; float32 holds the same numbers, and their products, exactly."""
    if knobs.runtime.interpret and dtype == torch.bfloat16:
        return tl.float32
    return _TYPES[dtype]


def has_group_products() -> bool:
    """Whether several warps share a matrix product and read its operands from shared memory (Hopper, Blackwell for data
    centres): tall tiles pay there, since operands take no registers."""
    if knobs.runtime.interpret:
        return True
    return 90 <= int(driver.active.get_current_target().arch) < 110
