"""What stands between two blocks of a decoder layer: the residual sum and the RMS norm of what the next block reads.

For: triton_ops.py. Does not know: models. Invariants: the residual stream is float32; one program has a whole token, so
that the order of its sums depends on the width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops import NormSpec


def residual_norm(
    residual: torch.Tensor,
    block: torch.Tensor | None,
    block_norm: NormSpec | None,
    factor: float,
    norm: NormSpec | None,
    out: torch.Tensor | None,
    tokens: torch.Tensor | None,
) -> None:
    """As Ops.residual_norm; rows contiguous. Without a block and an out there is nothing to do."""
    num_rows = residual.shape[0] if tokens is None else tokens.shape[0]
    if block is None and out is None:
        return
    width = residual.shape[1]
    padded = triton.next_power_of_2(width)
    residual_norm_kernel[(num_rows,)](
        residual, block, _weight(block_norm), out, _weight(norm), tokens,
        factor, _eps(block_norm), _eps(norm), width,
        residual.stride(0), 0 if block is None else block.stride(0), 0 if out is None else out.stride(0),
        WIDTH=padded, HAS_BLOCK=block is not None, HAS_BLOCK_NORM=block_norm is not None, HAS_OUT=out is not None,
        HAS_NORM=norm is not None, HAS_TOKENS=tokens is not None, num_warps=num_warps(padded),
    )  # fmt: skip


def num_warps(padded_width: int) -> int:
    """So that a thread holds 16 numbers or so."""
    return min(max(padded_width // 512, 1), 16)


def _weight(norm: NormSpec | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


def _eps(norm: NormSpec | None) -> float:
    return 0.0 if norm is None else norm.eps


@triton.jit
def residual_norm_kernel(
    residual, block, block_weight, out, weight, tokens,
    factor, block_eps, eps, width, residual_stride, block_stride, out_stride,
    WIDTH: tl.constexpr, HAS_BLOCK: tl.constexpr, HAS_BLOCK_NORM: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = row
    if HAS_TOKENS:
        token = tl.load(tokens + row).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    stream = residual + token * residual_stride + columns
    x = tl.load(stream, mask=inside, other=0.0)
    if HAS_BLOCK:
        added = tl.load(block + token * block_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_BLOCK_NORM:
            added = _normed(added, tl.load(block_weight + columns, mask=inside, other=0.0), block_eps, width)
        x += factor * added
        tl.store(stream, x, mask=inside)
    if HAS_OUT:
        if HAS_NORM:
            x = _normed(x, tl.load(weight + columns, mask=inside, other=0.0), eps, width)
        tl.store(out + row * out_stride + columns, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normed(x, weight, eps, width):
    mean = tl.sum(x * x, axis=0) / width
    return x * (1.0 / tl.sqrt_rn(mean + eps)) * weight
