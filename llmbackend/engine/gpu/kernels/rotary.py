"""What stands between the product that makes queries, keys and values, and attention: norms of heads, rotation, and the
write of keys and values to their slots, in one launch.

For: triton_ops.py. Does not know: how attention reads the cache. Invariants: computed in float32 and rounded once; what
is stored is finite; a token's numbers depend on that token alone; a padding token writes to no slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..ops import LayerCache, NormSpec, RotarySpec, StepLayout

_HEADS_AT_ONCE = 8
_MAX_TILE = 8192


def rotary_and_write(qkv: torch.Tensor, layout: StepLayout, spec: RotarySpec, cache: LayerCache) -> None:
    """As Ops.rotary_and_write; rows of qkv, the caches and the table of angles contiguous."""
    heads = _heads_at_once(spec)
    groups = triton.cdiv(spec.num_heads, heads) + 2 * triton.cdiv(spec.num_kv_heads, heads)
    rotary_dim = 0 if spec.cos_sin is None else spec.cos_sin.shape[1]
    half_padded = triton.next_power_of_2(max(rotary_dim // 2, 1))
    rest_padded = triton.next_power_of_2(max(spec.head_dim - rotary_dim, 1))
    rotary_kernel[(qkv.shape[0], groups)](
        qkv, layout.positions, layout.slots, spec.cos_sin, _weight(spec.q_norm), _weight(spec.k_norm),
        cache.keys, cache.values, qkv.stride(0), cache.keys.shape[2], _eps(spec.q_norm), _eps(spec.k_norm),
        1.0 / cache.key_scale, 1.0 / cache.value_scale,
        NUM_HEADS=spec.num_heads, NUM_KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim, ROTARY_DIM=rotary_dim,
        HEADS=heads, HALF_PADDED=half_padded, REST_PADDED=rest_padded,
        VALUE_PADDED=triton.next_power_of_2(spec.head_dim), Q_NORM=spec.q_norm is not None,
        K_NORM=spec.k_norm is not None, NORM_WHOLE=spec.norm_whole, LIMIT=torch.finfo(cache.keys.dtype).max,
        num_warps=_num_warps(heads * spec.head_dim),
    )  # fmt: skip


def _heads_at_once(spec: RotarySpec) -> int:
    """Heads of one program: all, where a norm goes over all of them, for queries are changed in place."""
    whole = spec.norm_whole and (spec.q_norm is not None or spec.k_norm is not None)
    wanted = max(spec.num_heads, spec.num_kv_heads) if whole else min(spec.num_heads, _HEADS_AT_ONCE)
    return int(triton.next_power_of_2(wanted))


def _num_warps(numbers: int) -> int:
    return 1 if numbers <= 512 else 4 if numbers <= _MAX_TILE else 8


def _weight(norm: NormSpec | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight


def _eps(norm: NormSpec | None) -> float:
    return 0.0 if norm is None else norm.eps


@triton.jit
def rotary_kernel(
    qkv, positions, slots, cos_sin, q_weight, k_weight, keys, values,
    qkv_stride, block_size, q_eps, k_eps, key_factor, value_factor,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr, HALF_PADDED: tl.constexpr, REST_PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr, NORM_WHOLE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    slot = tl.load(slots + token).to(tl.int64)
    stored = slot >= 0
    position = tl.load(positions + token).to(tl.int64)
    angles = cos_sin
    if ROTARY_DIM > 0:
        angles = cos_sin + tl.where(stored, position, 0) * ROTARY_DIM
    source = qkv + token * qkv_stride
    block = tl.where(stored, slot, 0) // block_size
    first_row = block * NUM_KV_HEADS * block_size + tl.where(stored, slot, 0) % block_size
    if group < q_groups:
        _move(
            source, source, HEAD_DIM, group * HEADS, NUM_HEADS, True, q_weight, q_eps, angles, 1.0,
            HEADS, HEAD_DIM, ROTARY_DIM, HALF_PADDED, REST_PADDED, Q_NORM, NORM_WHOLE, 0.0,
        )  # fmt: skip
    elif group < q_groups + kv_groups:
        _move(
            source + NUM_HEADS * HEAD_DIM, keys + first_row * HEAD_DIM, block_size * HEAD_DIM,
            (group - q_groups) * HEADS, NUM_KV_HEADS, stored, k_weight, k_eps, angles, key_factor,
            HEADS, HEAD_DIM, ROTARY_DIM, HALF_PADDED, REST_PADDED, K_NORM, NORM_WHOLE, LIMIT,
        )  # fmt: skip
    else:
        _move(
            source + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM, values + first_row * HEAD_DIM, block_size * HEAD_DIM,
            (group - q_groups - kv_groups) * HEADS, NUM_KV_HEADS, stored, k_weight, k_eps, angles, value_factor,
            HEADS, HEAD_DIM, 0, HALF_PADDED, VALUE_PADDED, False, False, LIMIT,
        )  # fmt: skip


@triton.jit
def _move(
    source, target, target_head_stride, first_head, num_heads, stored, weight, eps, angles, factor,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr, NORM: tl.constexpr, NORM_WHOLE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Heads of one token from source to target: normed, rotated (the first ROTARY_DIM of each head, in halves), times
    `factor`, and finite up to LIMIT unless that is 0."""
    heads = (first_head + tl.arange(0, HEADS))[:, None]
    present = heads < num_heads
    half = tl.arange(0, HALF_PADDED)[None, :]
    rest = ROTARY_DIM + tl.arange(0, REST_PADDED)[None, :]
    in_half = present & (half < ROTARY_DIM // 2)
    in_rest = present & (rest < HEAD_DIM)
    if ROTARY_DIM > 0:
        low = tl.load(source + heads * HEAD_DIM + half, mask=in_half, other=0.0).to(tl.float32)
        high = tl.load(source + heads * HEAD_DIM + ROTARY_DIM // 2 + half, mask=in_half, other=0.0).to(tl.float32)
    if ROTARY_DIM < HEAD_DIM:
        other = tl.load(source + heads * HEAD_DIM + rest, mask=in_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.zeros((HEADS,), tl.float32)
        if ROTARY_DIM > 0:
            squares += tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        if ROTARY_DIM < HEAD_DIM:
            squares += tl.sum(other * other, axis=1)
        weights = weight + tl.zeros_like(heads)
        if NORM_WHOLE:
            squares = tl.zeros_like(squares) + tl.sum(squares, axis=0) / num_heads
            weights += heads * HEAD_DIM
        scale = (1.0 / tl.sqrt_rn(squares / HEAD_DIM + eps))[:, None]
        if ROTARY_DIM > 0:
            low *= scale * tl.load(weights + half, mask=in_half, other=0.0)
            high *= scale * tl.load(weights + ROTARY_DIM // 2 + half, mask=in_half, other=0.0)
        if ROTARY_DIM < HEAD_DIM:
            other *= scale * tl.load(weights + rest, mask=in_rest, other=0.0)
    rows = target + heads * target_head_stride
    if ROTARY_DIM > 0:
        cos = tl.load(angles + half, mask=half < ROTARY_DIM // 2, other=0.0)
        sin = tl.load(angles + ROTARY_DIM // 2 + half, mask=half < ROTARY_DIM // 2, other=0.0)
        _store(rows + half, low * cos - high * sin, factor, in_half & stored, LIMIT)
        _store(rows + ROTARY_DIM // 2 + half, high * cos + low * sin, factor, in_half & stored, LIMIT)
    if ROTARY_DIM < HEAD_DIM:
        _store(rows + rest, other, factor, in_rest & stored, LIMIT)


@triton.jit
def _store(target, x, factor, mask, LIMIT: tl.constexpr):
    if LIMIT > 0.0:
        x = x * factor
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    tl.store(target, x.to(target.dtype.element_ty), mask=mask)
