"""Mixture of experts: selection, sorting tokens by expert, grouped products, and the weighted sum.

Used by triton_ops.py. A pair is a token and one of its experts: pair t * TOP_K + i is the i-th choice of token t. The
pairs of each expert fill tiles of ROWS places; an empty place is -1. Invariants: the result of a token depends only on
that token: an element of a product is one sum over k in ascending steps, in one program, and the experts of a token are
added in the order of its choices, in float32; sorting uses no atomic operation; the launches depend only on the number
of tokens. Nothing is read back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops.ops import Activation, ExpertScratch, ExpertSpec
from ..weights.experts import DenseExperts, ExpertProjection, Int4Experts
from . import fused
from .matmul import Tile, dot_dtype, half_of, own_place, sum_of_slabs

_AT_ONCE = 1024
"""Pairs that a program reads at a time when it looks for those of an expert."""
_GATE_TILE = 1024
_FEW_PACKED = Tile(rows=16, columns=64, depth=64, warps=4, stages=6)
_MANY_PACKED = Tile(rows=64, columns=128, depth=64, warps=8, stages=4)


@triton.jit
def choose_experts_kernel(
    logits, chosen, factors, num_experts, logits_stride, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Program token: the TOP_K most likely experts, ties in ascending order, and their shares. If a token's logits are
    not finite, its factors are NaN."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    there = expert < num_experts
    x = tl.load(logits + token * logits_stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    finite = there & (tl.abs(x) < float("inf"))
    broken = tl.sum((there & (finite == 0)).to(tl.int32), axis=0) > 0
    x = tl.where(finite, x, -3.0e38)
    weights = tl.where(finite, tl.exp(x - tl.max(x, axis=0)), 0.0)
    shares = tl.where(there, weights / tl.maximum(tl.sum(weights, axis=0), 1e-30), -1.0)
    left, kept = shares, 0.0
    for i in tl.static_range(TOP_K):
        best = tl.argmax(left, axis=0)
        share = tl.max(left, axis=0)
        kept += share
        left = tl.where(expert == best, -1.0, left)
        tl.store(chosen + token * TOP_K + i, best.to(tl.int32))
        tl.store(factors + token * TOP_K + i, tl.where(broken, float("nan"), share))
    if RENORMALISE:
        tl.debug_barrier()
        for i in tl.static_range(TOP_K):
            share = tl.load(factors + token * TOP_K + i)
            tl.store(factors + token * TOP_K + i, share / kept)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(chosen, counts, num_pairs, AT_ONCE: tl.constexpr):
    """Program expert: the number of its pairs."""
    expert = tl.program_id(0)
    found = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, num_pairs, AT_ONCE):
        pair = start + tl.arange(0, AT_ONCE)
        found += (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["num_pairs"])
def place_pairs_kernel(
    chosen, counts, pairs, tile_experts, num_tiles, num_pairs, num_experts,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program expert: its pairs in ascending order, after the tiles of the preceding experts."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    tiles = tl.cdiv(tl.load(counts + experts, mask=experts < num_experts, other=0), ROWS)
    first = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles, axis=0))
    count = tl.load(counts + expert)
    begin = first * ROWS
    for start in range(0, num_pairs, AT_ONCE):
        pair = start + tl.arange(0, AT_ONCE)
        own = (tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(pairs + begin + tl.cumsum(own, axis=0) - 1, pair, mask=own > 0)
        begin += tl.sum(own, axis=0)
    for tile in range(tl.cdiv(count, ROWS)):
        place = tile * ROWS + tl.arange(0, ROWS)
        tl.store(tile_experts + first + tile, expert)
        tl.store(pairs + first * ROWS + place, place * 0 - 1, mask=place >= count)


@triton.jit
def _pairs_of(pairs, tile_experts, tile, ROWS: tl.constexpr):
    """The expert of a tile, the pairs [ROWS] that it multiplies, and which of these exist."""
    pair = tl.load(pairs + tile * ROWS + tl.arange(0, ROWS))
    there = pair >= 0
    return tl.load(tile_experts + tile).to(tl.int64), tl.where(there, pair, 0).to(tl.int64), there


@triton.jit(do_not_specialize=["max_tiles"])
def grouped_matmul_kernel(
    x, weight, bias, pairs, tile_experts, num_tiles, out, n, k, expert_stride, n_stride, k_stride, max_tiles,
    SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out[pair] = x[pair // SHARED] · weight[expert]ᵀ + bias[expert], one tile per program."""
    tile, across = own_place(max_tiles, tl.cdiv(n, COLUMNS), GROUP)
    if tile >= tl.load(num_tiles):
        return
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    expert, row, there = _pairs_of(pairs, tile_experts, tile, ROWS)
    step = tl.arange(0, DEPTH)
    x += (row // SHARED)[:, None] * k + step[None, :]
    weight += expert * expert_stride + column.to(tl.int64)[None, :] * n_stride + step[:, None] * k_stride
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, DEPTH):
        left = step < k - start
        a = tl.load(x + start, mask=there[:, None] & left[None, :], other=0.0)
        b = tl.load(weight + start * k_stride, mask=left[:, None] & (column < n)[None, :], other=0.0)
        total = tl.dot(a.to(DOT), b.to(DOT), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + expert * n + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * n + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=there[:, None] & (column < n)[None, :])


@triton.jit(do_not_specialize=["max_tiles"])
def grouped_int4_matmul_kernel(
    x, data, scale, zero, bias, pairs, tile_experts, num_tiles, out, n, k, group_size, groups_stride, max_tiles,
    SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLAB: tl.constexpr, GROUP: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr, IS_FLOAT: tl.constexpr, HALF: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """As grouped_matmul_kernel, but for matrices of 4-bit numbers (weights/int4.py), stacked by rows."""
    tile, across = own_place(max_tiles, tl.cdiv(n, COLUMNS), GROUP)
    if tile >= tl.load(num_tiles):
        return
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    expert, row, there = _pairs_of(pairs, tile_experts, tile, ROWS)
    inside = column < n
    total = sum_of_slabs(
        x + (row // SHARED)[None, :] * k, there, data, scale, zero, expert * n + column, inside, k, group_size,
        groups_stride, ROWS, COLUMNS, SLAB, HAS_ZERO, IS_FLOAT, HALF, DOT,
    )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + expert * n + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    place = out + row[None, :] * n + column[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=there[None, :] & inside[:, None])


@triton.jit
def add_experts_kernel(x, factors, out, width, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """Program (token, tile): out[t] = the sum over i of factors[t, i] * x[t * TOP_K + i]."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    total = tl.zeros([TILE], tl.float32)
    for i in tl.static_range(TOP_K):
        pair = token * TOP_K + i
        total += tl.load(factors + pair) * tl.load(x + pair * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


def choose_tile(num_tokens: int, dtype: torch.dtype, is_packed: bool = False) -> Tile:
    """Chosen by the number of tokens in the step, as for dense products (`warm_up` runs one of each). With few tokens
    an expert has one or two of them: narrow tiles, limited by reading weights."""
    if dtype == torch.float32:  # no tensor cores; meant for verification, not for speed
        return Tile(rows=16, columns=32, depth=32, warps=4, stages=2)
    if is_packed:  # in steps of two slabs
        return _FEW_PACKED if num_tokens <= 256 else _MANY_PACKED
    if num_tokens <= 256:
        return Tile(rows=16, columns=64, depth=128, warps=4, stages=5)
    return Tile(rows=64, columns=128, depth=64, warps=4, stages=4)


def mix_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    spec: ExpertSpec,
    activation: Activation,
    scratch: ExpertScratch,
    out: torch.Tensor,
    tile: Tile,
) -> None:
    """As Ops.mix_experts, for at least one token."""
    num_tokens, width = x.shape
    num_pairs = num_tokens * spec.top_k
    choose_experts_kernel[(num_tokens,)](
        logits, scratch.chosen, scratch.factors, spec.num_experts, logits.stride(0),
        EXPERTS=triton.next_power_of_2(spec.num_experts), TOP_K=spec.top_k, RENORMALISE=spec.renormalises, num_warps=1,
    )  # fmt: skip
    count_pairs_kernel[(spec.num_experts,)](scratch.chosen, scratch.counts, num_pairs, AT_ONCE=_AT_ONCE)
    place_pairs_kernel[(spec.num_experts,)](
        scratch.chosen, scratch.counts, scratch.pairs, scratch.tile_experts, scratch.num_tiles, num_pairs,
        spec.num_experts, EXPERTS=triton.next_power_of_2(spec.num_experts), ROWS=tile.rows, AT_ONCE=_AT_ONCE,
    )  # fmt: skip
    max_tiles = num_pairs // tile.rows + min(spec.num_experts, num_pairs)
    gate_up = scratch.gate_up[:num_pairs]
    _multiply(x, spec.gate_up, scratch, max_tiles, gate_up, spec.top_k, tile)
    gated = scratch.gated[:num_pairs]
    inner = gated.shape[1]
    fused.gate_kernel[(num_pairs, triton.cdiv(inner, _GATE_TILE))](
        gate_up, gated, inner, gate_up.stride(0), gated.stride(0), ACTIVATION=activation, TILE=_GATE_TILE
    )
    mixed = scratch.mixed[:num_pairs]
    _multiply(gated, spec.down, scratch, max_tiles, mixed, 1, tile)
    add_experts_kernel[(num_tokens, triton.cdiv(width, _GATE_TILE))](
        mixed, scratch.factors, out, width, TOP_K=spec.top_k, TILE=_GATE_TILE
    )


def _multiply(
    x: torch.Tensor,
    projection: ExpertProjection,
    scratch: ExpertScratch,
    max_tiles: int,
    out: torch.Tensor,
    shared: int,
    tile: Tile,
) -> None:
    """Multiplies the pairs that were sorted into the scratch. shared: pairs for each row of x."""
    experts, bias = projection.weight, projection.bias
    grid = (max_tiles * triton.cdiv(experts.n, tile.columns),)
    tiles = scratch.pairs, scratch.tile_experts, scratch.num_tiles
    common = {
        "SHARED": shared, "ROWS": tile.rows, "COLUMNS": tile.columns, "GROUP": 8, "HAS_BIAS": bias is not None,
        "DOT": dot_dtype(x.dtype), "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False,
    }  # fmt: skip
    if isinstance(experts, Int4Experts):
        weight, zero = experts.whole, experts.whole.zero
        grouped_int4_matmul_kernel[grid](
            x, weight.data, weight.scale, weight.scale if zero is None else zero, bias, *tiles, out, experts.n,
            weight.k, weight.group_size, weight.scale.stride(0), max_tiles, SLAB=weight.slab,
            HAS_ZERO=zero is not None, IS_FLOAT=weight.is_float, HALF=half_of(x.dtype), **common,
        )  # fmt: skip
        return
    assert isinstance(experts, DenseExperts)
    grouped_matmul_kernel[grid](
        x, experts.tensor, bias, *tiles, out, experts.n, experts.k, *experts.tensor.stride(), max_tiles,
        DEPTH=tile.depth, **common,
    )  # fmt: skip
