"""All of a decoder layer except matrix products and attention: norms, rotary embedding, KV writes, gates, row tables;
and moves of whole KV blocks.

Launched by triton_ops.py and device_kv_memory.py. Invariants: computed in float32 and rounded once; a token's results
depend only on that token, and the order of its sums only on the width; stored keys and values are finite; a padding
token writes to no KV slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl


@triton.jit
def embed_kernel(
    token_ids, embedding, residual, factor, vocab_size, width, embedding_stride, residual_stride, TILE: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    token_id = tl.load(token_ids + token).to(tl.int64)
    known = (token_id >= 0) & (token_id < vocab_size)
    row = tl.load(embedding + token_id * embedding_stride + columns, mask=inside & known, other=0.0)
    tl.store(residual + token * residual_stride + columns, row.to(tl.float32) * factor, mask=inside)


@triton.jit
def residual_norm_kernel(
    residual, block, block_weight, out, scales, weight, tokens,
    factor, block_eps, eps, width, residual_stride, block_stride, out_stride,
    WIDTH: tl.constexpr, HAS_BLOCK: tl.constexpr, HAS_BLOCK_NORM: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_TOKENS: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """LARGEST: for an 8-bit out, the largest number of its type; its rows get scales; 0 = out is in the model's
    dtype."""
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
        if LARGEST > 0:
            scale = scale_of(tl.max(size_of(x), axis=0), LARGEST)
            tl.store(scales + row, scale)
            x = in_eight_bits(x, scale, LARGEST)
        tl.store(out + row * out_stride + columns, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normed(x, weight, eps, width):
    mean = tl.sum(x * x, axis=0) / width
    return x * (1.0 / tl.sqrt_rn(mean + eps)) * weight


@triton.jit
def rotary_kernel(
    qkv, positions, slots, cos_sin, q_weight, k_weight, keys, values,
    qkv_stride, block_size, q_eps, k_eps,
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
            source, source, HEAD_DIM, group * HEADS, NUM_HEADS, True, q_weight, q_eps, angles,
            HEADS, HEAD_DIM, ROTARY_DIM, HALF_PADDED, REST_PADDED, Q_NORM, NORM_WHOLE, 0.0,
        )  # fmt: skip
    elif group < q_groups + kv_groups:
        _move(
            source + NUM_HEADS * HEAD_DIM, keys + first_row * HEAD_DIM, block_size * HEAD_DIM,
            (group - q_groups) * HEADS, NUM_KV_HEADS, stored, k_weight, k_eps, angles,
            HEADS, HEAD_DIM, ROTARY_DIM, HALF_PADDED, REST_PADDED, K_NORM, NORM_WHOLE, LIMIT,
        )  # fmt: skip
    else:
        _move(
            source + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM, values + first_row * HEAD_DIM, block_size * HEAD_DIM,
            (group - q_groups - kv_groups) * HEADS, NUM_KV_HEADS, stored, k_weight, k_eps, angles,
            HEADS, HEAD_DIM, 0, HALF_PADDED, VALUE_PADDED, False, False, LIMIT,
        )  # fmt: skip


@triton.jit
def _move(
    source, target, target_head_stride, first_head, num_heads, stored, weight, eps, angles,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr, NORM: tl.constexpr, NORM_WHOLE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Copies heads of one token from source to target: normed, rotated (the first ROTARY_DIM of each head, in halves),
    and, unless LIMIT is 0, made finite up to LIMIT."""
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
        _store(rows + half, low * cos - high * sin, in_half & stored, LIMIT)
        _store(rows + ROTARY_DIM // 2 + half, high * cos + low * sin, in_half & stored, LIMIT)
    if ROTARY_DIM < HEAD_DIM:
        _store(rows + rest, other, in_rest & stored, LIMIT)


@triton.jit
def _store(target, x, mask, LIMIT: tl.constexpr):
    if LIMIT > 0.0:
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    tl.store(target, x.to(target.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(gate_up, out, width, gate_up_stride, out_stride, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < width
    result = _gated(gate_up + token * gate_up_stride, columns, width, ACTIVATION)
    tl.store(out + token * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_in_eight_bits_kernel(
    gate_up, out, scales, width, gate_up_stride, ACTIVATION: tl.constexpr, TILE: tl.constexpr, LARGEST: tl.constexpr
):
    """One program per token: computes the gate once to find the largest number, and again to store."""
    token = tl.program_id(0).to(tl.int64)
    gates = gate_up + token * gate_up_stride
    sizes = tl.zeros([TILE], tl.float32)
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)
        sizes = tl.maximum(sizes, size_of(_gated(gates, columns, width, ACTIVATION)))
    scale = scale_of(tl.max(sizes, axis=0), LARGEST)
    tl.store(scales + token, scale)
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)
        result = in_eight_bits(_gated(gates, columns, width, ACTIVATION), scale, LARGEST)
        tl.store(out + token * width + columns, result.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def quantize_kernel(x, out, scales, width, x_stride, TILE: tl.constexpr, LARGEST: tl.constexpr):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    source = x + row * x_stride
    sizes = tl.zeros([TILE], tl.float32)
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)
        sizes = tl.maximum(sizes, size_of(tl.load(source + columns, mask=columns < width, other=0.0).to(tl.float32)))
    scale = scale_of(tl.max(sizes, axis=0), LARGEST)
    tl.store(scales + row, scale)
    for start in range(0, width, TILE):
        columns = start + tl.arange(0, TILE)
        numbers = tl.load(source + columns, mask=columns < width, other=0.0).to(tl.float32)
        numbers = in_eight_bits(numbers, scale, LARGEST)
        tl.store(out + row * width + columns, numbers.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def size_of(x):
    """Absolute values; infinity for NaN, which a maximum would skip."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))


@triton.jit
def scale_of(largest_size, LARGEST: tl.constexpr):
    """The scale of a row; NaN if the row is not finite."""
    scale = tl.maximum(tl.div_rn(largest_size, LARGEST), 1e-12)
    return tl.where(largest_size < float("inf"), scale, float("nan"))


@triton.jit
def in_eight_bits(x, scale, LARGEST: tl.constexpr):
    """float32 numbers that the 8-bit type represents after rounding; integers, half to even, for int8."""
    x = tl.div_rn(x, tl.zeros_like(x) + scale)
    x = tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LARGEST), LARGEST)
    if LARGEST == 127.0:
        x = (x + 12582912.0) - 12582912.0
    return x


@triton.jit
def _gated(row, columns, width, ACTIVATION: tl.constexpr):
    """As ops.gated, for these columns of the result; float32."""
    inside = columns < width
    if ACTIVATION == "swigluoai":
        x = tl.load(row + 2 * columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(row + 2 * columns + 1, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(x > 7.0, 7.0, x)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    else:
        x = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(row + width + columns, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "swigluoai":
        slope = 1.702 * x
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u.
        slope = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    else:
        slope = x
    # The bound on the exponent only affects infinities, which would become NaN.
    return x / (1.0 + tl.exp(tl.minimum(-slope, 88.0))) * up


@triton.jit(do_not_specialize=["num_sequences", "num_tokens"])
def step_inputs_kernel(
    rows, query_start, seq_lens, token_table, token_stride, block_table, block_stride, adapter_of_row,
    token_ids, positions, slots, adapters, num_sequences, num_tokens,
    BLOCK_SIZE: tl.constexpr, PADDING: tl.constexpr, NO_ADAPTER: tl.constexpr, TOKENS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    sequence = tl.zeros([TOKENS], tl.int32)  # the number of sequences that end before the token
    for start in range(0, num_sequences, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        ends = tl.load(query_start + 1 + other, mask=other < num_sequences, other=0x7FFFFFFF)
        sequence += tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    real = sequence < num_sequences
    row = tl.load(rows + sequence, mask=real, other=0).to(tl.int64)
    end = tl.load(query_start + 1 + sequence, mask=real, other=0)
    position = tl.load(seq_lens + sequence, mask=real, other=0) - end + token
    live = real & (position >= 0)
    position = tl.where(live, position, 0)
    token_id = tl.load(token_table + row * token_stride + position, mask=live, other=0)
    block = tl.load(block_table + row * block_stride + position // BLOCK_SIZE, mask=live, other=0)
    slot = tl.where(live, block * BLOCK_SIZE + position % BLOCK_SIZE, PADDING)
    inside = token < num_tokens
    tl.store(token_ids + token, token_id, mask=inside)
    tl.store(positions + token, position, mask=inside)
    tl.store(slots + token, slot, mask=inside)
    tl.store(adapters + token, tl.load(adapter_of_row + row, mask=live, other=NO_ADAPTER), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def put_tokens_kernel(rows, positions, token_ids, token_table, token_stride, num_rows, AT_ONCE: tl.constexpr):
    place = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = place < num_rows
    row = tl.load(rows + place, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + place, mask=inside, other=0)
    token_id = tl.load(token_ids + place, mask=inside, other=0)
    tl.store(token_table + row * token_stride + position, tl.maximum(token_id, 0), mask=inside)


_WORD_BYTES = 8
_TILE = 1024
"""Words per program."""


@triton.jit(do_not_specialize_on_alignment=["blocks"])
def move_blocks_kernel(parts, ends, staged, blocks, staged_words, IS_GATHER: tl.constexpr, TILE: tl.constexpr):
    """Program (place in the buffer, part of a block, tile). parts int64: the parts' addresses. ends int64: where each
    starts in a block, and the block's end, in words."""
    place, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(ends + part)
    size = tl.load(ends + part + 1) - begin
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = word < size
    block = tl.load(blocks + place).to(tl.int64)
    in_cache = tl.load(parts + part).to(tl.pointer_type(tl.int64)) + block * size + word
    in_buffer = staged + place * staged_words + begin + word
    if IS_GATHER:
        tl.store(in_buffer, tl.load(in_cache, mask=inside, other=0), mask=inside)
    else:
        tl.store(in_cache, tl.load(in_buffer, mask=inside, other=0), mask=inside)


class BlockMoves:
    """Gathers KV blocks of all layers into one buffer, or scatters them from it, as bytes, in one launch."""

    def __init__(self, parts: Sequence[torch.Tensor], ends: Sequence[int], staged: torch.Tensor) -> None:
        """parts uint8 [num_blocks, bytes of a block's part], contiguous; ends: where each starts in a block, and the
        block's end; staged uint8 [places, bytes of a block]. All are multiples of 8 bytes."""
        if any(end % _WORD_BYTES for end in ends):
            raise ValueError(f"parts of KV blocks begin at {list(ends)}, expected multiples of {_WORD_BYTES} bytes")
        self._kept, self._device = list(parts), staged.device
        self._parts = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=self._device)
        words = [end // _WORD_BYTES for end in ends]
        self._ends = torch.tensor(words, dtype=torch.int64, device=self._device)
        self._staged, self._block_words = staged.view(torch.int64), words[-1]
        self._tiles = max(triton.cdiv(part.shape[1], _WORD_BYTES * _TILE) for part in parts)

    def gather(self, blocks: Sequence[int]) -> None:
        """Device work: staged[i] = blocks[i]."""
        self._move(blocks, is_gather=True)

    def spread(self, blocks: Sequence[int]) -> None:
        """Device work: blocks[i] = staged[i]."""
        self._move(blocks, is_gather=False)

    def _move(self, blocks: Sequence[int], is_gather: bool) -> None:
        numbers = torch.tensor(blocks, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        move_blocks_kernel[(len(blocks), len(self._kept), self._tiles)](
            self._parts, self._ends, self._staged, numbers.to(self._device, non_blocking=True), self._block_words,
            IS_GATHER=is_gather, TILE=_TILE,
        )  # fmt: skip
