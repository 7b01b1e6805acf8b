"""Products of tokens by the two matrices of their LoRA adapters, added to the output of the base layer.

Used by triton_ops.py. The tokens of a step are sorted by adapter once (the sort of experts.py), into tiles that all of
its products use: the matrices of an adapter are read once per LORA_ROWS of its tokens, in prefill and decode, instead
of once per token, and multiplied by tensor cores. The first matrix shrinks the input to the rank, in splits so that few
tokens occupy many multiprocessors; the second expands the sum of the splits into the output's columns. Invariants: the
result of a token depends only on that token and its adapter: tile size and splits are the same in every step, a split
is one sum over k in ascending steps, and splits are added in order, in float32; the launches depend only on the number
of tokens; tiles without tokens, and parts that an adapter does not change, exit immediately. Nothing is allocated and
nothing is read back.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops.ops import LORA_ROWS, LORA_SPLITS, LoraScratch, LoraSpec
from .experts import count_pairs_kernel, place_pairs_kernel
from .matmul import dot_dtype

_AT_ONCE = 1024
"""Tokens that a program of the sort reads at a time."""
_DEPTH = 128
_MIN_SPLIT = 512
"""Minimum columns of the input per split."""
_SHRINK_RANKS, _EXPAND_RANKS = 64, 32
"""Maximum ranks of a tile; the second kernel keeps those of all splits in registers."""
_COLUMNS = 128


@triton.jit
def lora_shrink_kernel(
    x, down, ranks, tokens, tile_slots, num_tiles, hidden, k, hidden_stride, split_stride,
    PARTS: tl.constexpr, MAX_RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (tile, split, part and tile of ranks): hidden[split, place] = down[slot] · x[token], over the split's
    columns."""
    tile, split = tl.program_id(0), tl.program_id(1)
    if tile >= tl.load(num_tiles):
        return
    part = tl.program_id(2) // (MAX_RANK // RANKS)
    first = tl.program_id(2) % (MAX_RANK // RANKS) * RANKS
    slot = tl.load(tile_slots + tile).to(tl.int64)
    own_rank = tl.load(ranks + slot * PARTS + part)
    if first >= own_rank:
        return
    place = tile * ROWS + tl.arange(0, ROWS)
    token = tl.load(tokens + place)
    there = token >= 0
    rank, step = first + tl.arange(0, RANKS), tl.arange(0, DEPTH)
    x += tl.where(there, token, 0).to(tl.int64)[:, None] * k + step[None, :]
    down += ((slot * PARTS + part) * MAX_RANK + rank)[:, None] * k + step[None, :]
    total = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, k), DEPTH):
        left = (step < k - start)[None, :]
        a = tl.load(x + start, mask=there[:, None] & left, other=0.0)
        b = tl.load(down + start, mask=(rank < own_rank)[:, None] & left, other=0.0)
        total = tl.dot(a.to(DOT), tl.trans(b.to(DOT)), total, input_precision="ieee")
    hidden += split * split_stride + place.to(tl.int64)[:, None] * hidden_stride
    tl.store(hidden + (part * MAX_RANK + rank)[None, :], total)


@triton.jit
def lora_expand_kernel(
    hidden, up, ranks, tokens, tile_slots, num_tiles, out, n, width_0, width_1, hidden_stride, split_stride,
    PARTS: tl.constexpr, MAX_RANK: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Program (tile, tile of columns of one part): out[token] += up[slot] · the sum of the place's splits."""
    tile, across = tl.program_id(0), tl.program_id(1)
    if tile >= tl.load(num_tiles):
        return
    before_1 = tl.cdiv(width_0, COLUMNS)
    before_2 = before_1 + tl.cdiv(width_1, COLUMNS)
    part = (across >= before_1).to(tl.int32) + (across >= before_2).to(tl.int32)
    slot = tl.load(tile_slots + tile).to(tl.int64)
    own_rank = tl.load(ranks + slot * PARTS + part)
    if own_rank == 0:
        return
    before = tl.where(part == 0, 0, tl.where(part == 1, before_1, before_2))
    begin = tl.where(part == 0, 0, tl.where(part == 1, width_0, width_0 + width_1))
    end = tl.where(part == 0, width_0, tl.where(part == 1, width_0 + width_1, n))
    column = begin + (across - before) * COLUMNS + tl.arange(0, COLUMNS)
    place = tile * ROWS + tl.arange(0, ROWS)
    token = tl.load(tokens + place)
    step = tl.arange(0, RANKS)
    hidden += place.to(tl.int64)[:, None] * hidden_stride + (part * MAX_RANK + step)[None, :]
    up += (slot * n + column)[:, None] * MAX_RANK + step[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, own_rank, RANKS):
        left = (step < own_rank - start)[None, :]
        a = tl.zeros([ROWS, RANKS], tl.float32)
        for split in tl.static_range(SPLITS):
            a += tl.load(hidden + split * split_stride + start, mask=left, other=0.0)
        b = tl.load(up + start, mask=(column < end)[:, None] & left, other=0.0)
        total = tl.dot(a.to(out.dtype.element_ty).to(DOT), tl.trans(b.to(DOT)), total, input_precision="ieee")
    there = (token >= 0)[:, None] & (column < end)[None, :]
    out += token.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(out, (tl.load(out, mask=there, other=0.0).to(tl.float32) + total).to(out.dtype.element_ty), mask=there)


def group_by_adapter(adapters: torch.Tensor, scratch: LoraScratch) -> None:
    """As Ops.group_by_adapter."""
    num_slots, num_tokens = len(scratch.counts), len(adapters)
    count_pairs_kernel[(num_slots,)](adapters, scratch.counts, num_tokens, AT_ONCE=_AT_ONCE)
    place_pairs_kernel[(num_slots,)](
        adapters, scratch.counts, scratch.tokens, scratch.tile_slots, scratch.num_tiles, num_tokens, num_slots,
        EXPERTS=triton.next_power_of_2(num_slots), ROWS=LORA_ROWS, AT_ONCE=_AT_ONCE,
    )  # fmt: skip


def add_loras(x: torch.Tensor, spec: LoraSpec, scratch: LoraScratch, out: torch.Tensor) -> None:
    """As Ops.add_loras, for at least one token."""
    (num_tokens, k), n = x.shape, out.shape[1]
    num_parts, max_rank = len(spec.widths), spec.max_rank
    split = _split(k)
    splits, ranks = triton.cdiv(k, split), min(max_rank, _SHRINK_RANKS)
    tiles = num_tokens // LORA_ROWS + min(len(scratch.counts), num_tokens)
    sorted_tokens = spec.ranks, scratch.tokens, scratch.tile_slots, scratch.num_tiles
    sizes = {"PARTS": num_parts, "MAX_RANK": max_rank, "ROWS": LORA_ROWS, "DOT": dot_dtype(x.dtype)}
    strides = scratch.hidden.stride(1), scratch.hidden.stride(0)
    lora_shrink_kernel[(tiles, splits, num_parts * max_rank // ranks)](
        x, spec.down, *sorted_tokens, scratch.hidden, k, *strides,
        **sizes, RANKS=ranks, DEPTH=_DEPTH, SPLIT=split,
        num_warps=2 if ranks < 64 else 4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
    first, second = spec.widths[0], spec.widths[1] if num_parts > 1 else 0
    across = sum(triton.cdiv(width, _COLUMNS) for width in spec.widths)
    lora_expand_kernel[(tiles, across)](
        scratch.hidden, spec.up, *sorted_tokens, out, n, first, second, *strides,
        **sizes, RANKS=min(max_rank, _EXPAND_RANKS), COLUMNS=_COLUMNS, SPLITS=splits,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _split(k: int) -> int:
    return max(_MIN_SPLIT, -(-k // (LORA_SPLITS * _DEPTH)) * _DEPTH)
