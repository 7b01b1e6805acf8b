"""Products of matrices in 8 bits, with a scale for each row of both, in one kernel.

For: weights in whole numbers on a GPU, whose library gives unscaled sums; it also takes float8. Does not know: models,
how the numbers were rounded. Invariants: sums of whole numbers are exact; an element of the output is one sum over k in
ascending steps, in one program, times both scales, plus the bias, in float32 and rounded once. Nothing is allocated and
nothing read back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .matmul import Tile, own_tile


def choose_tile(num_rows: int) -> Tile:
    """As for matrices of 16 bits, whose tiles have the same bytes at half the depth."""
    if num_rows <= 64:
        return Tile(rows=64, columns=32, depth=128, warps=4, stages=8)
    if num_rows <= 256:
        return Tile(rows=64, columns=64, depth=128, warps=4, stages=6)
    return Tile(rows=128, columns=128, depth=128, warps=8, stages=4)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["x_scale", "weight_scale", "bias"])
def scaled_matmul_kernel(
    x, x_scale, weight, weight_scale, bias, out, num_rows, n, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """One tile per program."""
    row, column = own_tile(num_rows, n, ROWS, COLUMNS, GROUP)
    step = tl.arange(0, DEPTH)
    x += row.to(tl.int64)[:, None] * k + step[None, :]
    weight += column.to(tl.int64)[:, None] * k + step[None, :]
    total = tl.zeros([ROWS, COLUMNS], SUM)
    for start in range(0, k, DEPTH):
        left = (step < k - start)[None, :]
        a = tl.load(x + start, mask=(row < num_rows)[:, None] & left, other=0.0)
        b = tl.load(weight + start, mask=(column < n)[:, None] & left, other=0.0)
        total = tl.dot(a, tl.trans(b), total, max_num_imprecise_acc=DEPTH, out_dtype=SUM)
    rows_scale = tl.load(x_scale + row, mask=row < num_rows, other=0.0)[:, None]
    columns_scale = tl.load(weight_scale + column, mask=column < n, other=0.0)[None, :]
    result = total.to(tl.float32) * rows_scale * columns_scale
    if HAS_BIAS:
        result += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < n)[None, :])


def scaled_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out [T, n] = (x * x_scale) · (weight * weight_scale[:, None])ᵀ + bias [n]. x [T, k] and weight [n, k]: int8 or
    float8_e4m3fn, contiguous; x_scale float32 [T, 1], weight_scale float32 [n]."""
    (num_rows, k), n = x.shape, weight.shape[0]
    if num_rows == 0:
        return
    tile = choose_tile(num_rows)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns),)
    scaled_matmul_kernel[grid](
        x, x_scale, weight, weight_scale, weight_scale if bias is None else bias, out, num_rows, n, k,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=8, HAS_BIAS=bias is not None,
        SUM=tl.int32 if x.dtype == torch.int8 else tl.float32, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
