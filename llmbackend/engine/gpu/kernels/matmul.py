"""Matrix product kernels: batch-invariant, 8-bit and 4-bit ones, and the types of their operands.

Used by attention; by programs in batch-invariant mode, instead of the vendor's library, which chooses kernels, and so
the order of sums, by shape; for int8 weights on a GPU, for which the library returns unscaled sums (float8 works too);
and for 4-bit weights of checkpoints.

Invariants: an element of the output is one sum over k in ascending steps of 16, from zero, in one program, with scales
and bias applied at the end; the number of rows changes only what else is computed, and never splits k. On Hopper every
tile has at least 64 rows, so few and many rows use the same instruction (wgmma, of different widths); before Hopper
there is one instruction (mma.sync). In float32 an element is a chain of fma; integer sums are exact. Nothing is
allocated and nothing is read back.

4 bits: the layout is that of weights/int4.py. The numbers of a row are in blocks of 2 * SLAB; byte j of a block
contains number j in its low nibble and number SLAB + j in its high nibble, so the nibbles of a byte belong to two
products and nothing moves between threads. The output is computed as weight · xᵀ: tensor cores take the unpacked
weights from registers as their left operand, and few tokens make a narrow product instead of a mostly empty one.
Numbers minus their zero points are exact in 16 bits; the sum of each slab is multiplied by the scale of its group in
float32, and slabs are added in ascending order, in one program; with `exact` every tile uses the same kind of
instruction, so the result of a row depends on no other row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver


@dataclass(frozen=True, slots=True)
class Tile:
    """rows x columns of the output, computed in steps of `depth` along k."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def choose_tile(num_rows: int, dtype: torch.dtype) -> Tile:
    """Few rows are limited by memory, and get narrow tiles, so that even a small matrix has enough of them for all
    multiprocessors, with many loads in flight. Many rows are limited by the tensor cores, and get large tiles. A tile
    has the same number of bytes in 16 and in 8 bits."""
    if dtype == torch.float32:  # no tensor cores; meant for verification, not for speed
        return Tile(rows=32, columns=32, depth=32, warps=4, stages=2)
    depth = 128 // dtype.itemsize
    if num_rows <= 64:
        return Tile(rows=64, columns=32, depth=depth, warps=4, stages=8)
    if num_rows <= 256:
        return Tile(rows=64, columns=64, depth=depth, warps=4, stages=6)
    return Tile(rows=128, columns=128, depth=depth, warps=8, stages=4)


@triton.jit
def own_place(tiles_down, tiles_across, GROUP: tl.constexpr):
    """The tile of this program, counted down and across. Concurrent programs share weights: GROUP tiles of rows come
    before the next tile of columns."""
    program = tl.program_id(0)
    group = program // (GROUP * tiles_across)
    height = tl.minimum(tiles_down - group * GROUP, GROUP)
    within = program - group * GROUP * tiles_across
    return group * GROUP + within % height, within // height


@triton.jit
def own_tile(num_rows, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """[ROWS] and [COLUMNS]: the product's rows and columns that this program computes."""
    down, across = own_place(tl.cdiv(num_rows, ROWS), tl.cdiv(n, COLUMNS), GROUP)
    return down * ROWS + tl.arange(0, ROWS), across * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit(do_not_specialize=["num_rows"])
def invariant_matmul_kernel(
    x, weight, bias, out, num_rows, n, k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One tile per program."""
    row, column = own_tile(num_rows, n, ROWS, COLUMNS, GROUP)
    step = tl.arange(0, DEPTH)
    x += row.to(tl.int64)[:, None] * k + step[None, :]
    weight += column.to(tl.int64)[:, None] * k + step[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, DEPTH):
        left = (step < k - start)[None, :]
        a = tl.load(x + start, mask=(row < num_rows)[:, None] & left, other=0.0)
        b = tl.load(weight + start, mask=(column < n)[:, None] & left, other=0.0)
        total = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    place = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row < num_rows)[:, None] & (column < n)[None, :])


def invariant_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As weights.Matmul: out [T, n] = x [T, k] · weight [n, k]ᵀ + bias [n]; all contiguous and of one dtype:
    bfloat16, float16 or float32."""
    (num_rows, k), n = x.shape, weight.shape[0]
    if num_rows == 0:
        return
    tile = choose_tile(num_rows, x.dtype)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns),)
    invariant_matmul_kernel[grid](
        x, weight, weight if bias is None else bias, out, num_rows, n, k,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=8, HAS_BIAS=bias is not None,
        DOT=dot_dtype(x.dtype), num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Operand type of matrix products in a model of this dtype. The interpreter would multiply the bits of bfloat16
    numbers as integers; float32 represents the same numbers, and their products, exactly."""
    if knobs.runtime.interpret and dtype == torch.bfloat16:
        return tl.float32
    return _TYPES[dtype]


def has_group_products() -> bool:
    """Whether several warps compute a matrix product together and read its operands from shared memory (Hopper,
    data-centre Blackwell): tall tiles are faster there, because operands take no registers."""
    if knobs.runtime.interpret:
        return True
    return 90 <= _capability() < 110


def has_tensor_memory() -> bool:
    """Whether sums of matrix products are kept outside of registers (data-centre Blackwell), so that a tile whose sums
    are rescaled at each step needs registers for them as well."""
    return not knobs.runtime.interpret and 100 <= _capability() < 110


def has_little_shared_memory() -> bool:
    """Whether a multiprocessor has 100 KiB of shared memory (8.6, 8.9, 12.x) instead of 164 KiB and more."""
    return not knobs.runtime.interpret and (_capability() in (86, 89) or _capability() >= 120)


def _capability() -> int:
    return int(driver.active.get_current_target().arch)


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
    tile = choose_tile(num_rows, x.dtype)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns),)
    scaled_matmul_kernel[grid](
        x, x_scale, weight, weight_scale, weight_scale if bias is None else bias, out, num_rows, n, k,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, GROUP=8, HAS_BIAS=bias is not None,
        SUM=tl.int32 if x.dtype == torch.int8 else tl.float32, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int4Tile:
    """rows x columns of the output, computed in steps of two slabs along k."""

    rows: int
    columns: int
    warps: int
    stages: int


def choose_int4_tile(num_rows: int, dtype: torch.dtype, exact: bool) -> Int4Tile:
    """Few rows are limited by reading and unpacking weights: Hopper's own instruction (wgmma) needs at least 64
    columns, while 32, with the older instruction, give twice as many programs."""
    if dtype == torch.float32:  # no tensor cores; meant for verification, not for speed
        return Int4Tile(rows=16, columns=32, warps=4, stages=2)
    if num_rows <= 16:
        columns, warps = (64, 4) if exact else (32, 2)
        return Int4Tile(rows=16, columns=columns, warps=warps, stages=6)
    if num_rows <= 64:
        return Int4Tile(rows=64, columns=64, warps=8, stages=4)
    if num_rows <= 256:
        return Int4Tile(rows=64, columns=128, warps=8, stages=4)
    return Int4Tile(rows=128, columns=128, warps=8, stages=3 if has_little_shared_memory() else 4)


@triton.jit
def sum_of_slabs(
    x, x_there, data, scale, zero, row, inside, k, group_size, groups_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLAB: tl.constexpr, HAS_ZERO: tl.constexpr, IS_FLOAT: tl.constexpr,
    HALF: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """float32 [COLUMNS, ROWS]: the weight's rows (row, masked by inside) times the rows at pointers x [1, ROWS] (masked
    by x_there)."""
    step = tl.arange(0, SLAB)
    x += step[:, None]
    data += row.to(tl.int64)[:, None] * (tl.cdiv(k, 2 * SLAB) * SLAB) + step[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    for start in range(0, k, 2 * SLAB):
        both = tl.load(data + start // 2, mask=inside[:, None], other=0).to(tl.uint16)
        for upper in tl.static_range(2):
            first = start + upper * SLAB
            place = first // group_size * groups_stride + row
            there = inside & (first < k)
            numbers = (both >> (4 * upper)) & 15
            if IS_FLOAT:
                weight = _floats(numbers, HALF)
                factor = _powers(tl.load(scale + place, mask=there, other=0))
            else:
                weight = _less_zero(numbers, zero + place, there, COLUMNS, HAS_ZERO, HALF)
                factor = tl.load(scale + place, mask=there, other=0.0).to(tl.float32)
            a = tl.load(x + first, mask=x_there[None, :] & (step < k - first)[:, None], other=0.0)
            total += tl.dot(weight.to(DOT), a.to(DOT), input_precision="ieee") * factor[:, None]
    return total


@triton.jit
def _less_zero(numbers, zero, there, COLUMNS: tl.constexpr, HAS_ZERO: tl.constexpr, HALF: tl.constexpr):
    """Numbers minus zero point. As the low bits of a large float's mantissa, a number q makes that float plus q."""
    LARGE: tl.constexpr = 128 if HALF == tl.bfloat16 else 1024  # noqa: SIM300
    BITS: tl.constexpr = 0x4300 if HALF == tl.bfloat16 else 0x6400  # noqa: SIM300
    if HAS_ZERO:
        least = (tl.load(zero, mask=there, other=0).to(tl.float32) + LARGE).to(HALF)
    else:
        least = tl.full([COLUMNS], LARGE + 8, HALF)
    return (numbers | BITS).to(HALF, bitcast=True) - least[:, None]


@triton.jit
def _floats(numbers, HALF: tl.constexpr):
    """The values of e2m1 bit patterns: placed at the sign, the lowest exponent bits and the highest mantissa bit, they
    are the value divided by a power of two, even if it is subnormal."""
    SHIFT: tl.constexpr = 6 if HALF == tl.bfloat16 else 9  # noqa: SIM300
    POWER: tl.constexpr = 2.0**126 if HALF == tl.bfloat16 else 2.0**14  # noqa: SIM300
    bits = ((numbers & 8) << 12) | ((numbers & 7) << SHIFT)
    return bits.to(HALF, bitcast=True) * POWER


@triton.jit
def _powers(scales):
    """e8m0 as float32: 2 to the power of the number minus 127."""
    bits = scales.to(tl.int32) << 23
    return tl.where(bits == 0, 0x400000, bits).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["scale", "zero", "bias"])
def int4_matmul_kernel(
    x, data, scale, zero, bias, out, num_rows, n, k, group_size, groups_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLAB: tl.constexpr, GROUP: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_FLOAT: tl.constexpr, HALF: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One tile per program."""
    row, column = own_tile(num_rows, n, ROWS, COLUMNS, GROUP)
    inside = column < n
    total = sum_of_slabs(
        x + row.to(tl.int64)[None, :] * k, row < num_rows, data, scale, zero, column, inside, k, group_size,
        groups_stride, ROWS, COLUMNS, SLAB, HAS_ZERO, IS_FLOAT, HALF, DOT,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    place_out = out + row.to(tl.int64)[None, :] * n + column[:, None]
    tl.store(place_out, total.to(out.dtype.element_ty), mask=(row < num_rows)[None, :] & inside[:, None])


def int4_matmul(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group_size: int,
    slab: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    exact: bool = False,
    is_float: bool = False,
) -> None:
    """out [T, n] = x [T, k] · weightᵀ + bias [n], for the weight given by these parts of an Int4Weight. x in bfloat16,
    float16 or float32, contiguous."""
    (num_rows, k), n = x.shape, data.shape[0]
    if num_rows == 0:
        return
    tile = choose_int4_tile(num_rows, x.dtype, exact)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(n, tile.columns),)
    int4_matmul_kernel[grid](
        x, data, scale, scale if zero is None else zero, scale if bias is None else bias, out,
        num_rows, n, k, group_size, scale.stride(0),
        ROWS=tile.rows, COLUMNS=tile.columns, SLAB=slab, GROUP=8, HAS_ZERO=zero is not None, HAS_BIAS=bias is not None,
        IS_FLOAT=is_float, HALF=half_of(x.dtype), DOT=dot_dtype(x.dtype), num_warps=tile.warps, num_stages=tile.stages,
        enable_fp_fusion=False,
    )  # fmt: skip


def half_of(dtype: torch.dtype) -> tl.dtype:
    """The 16-bit type in which numbers are unpacked. The interpreter subtracts bits of bfloat16 as integers."""
    return tl.bfloat16 if dtype == torch.bfloat16 and not knobs.runtime.interpret else tl.float16
