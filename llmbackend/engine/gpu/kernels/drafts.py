"""Kernels for drafts in a step that is launched before the previous one is read: lookups, positions, acceptance.

Used by triton_ops.py. Invariants: the definitions are those of `look_up` and `num_accepted`; the result of a row
depends only on its own text, not on the number of programs. `drafted` int32 [NUM_FIELDS, n] is that of `drafted_rows`.
"""

from __future__ import annotations

import triton
import triton.language as tl

SPLIT_TOKENS = 4096
"""Tokens of a text searched by each program."""


@triton.jit
def _num_tokens(drafted, num_drafted, place, num_tokens):
    """Row, its number of tokens before the step, and how many fewer these are than assumed."""
    row = tl.load(drafted + place).to(tl.int64)
    assumed = tl.load(drafted + num_drafted + place)
    may_differ = tl.load(drafted + 2 * num_drafted + place)
    if may_differ > 0:
        length = tl.load(num_tokens + row)
    else:
        length = assumed
    return row, length, assumed - length


@triton.jit(do_not_specialize=["num_drafted"])
def look_up_kernel(
    drafted, num_drafted, num_tokens, token_table, token_stride, found,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, SPLIT: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """found int64 [n, splits]: the best earlier occurrence that ends in a split: number of equal tokens, then the
    position after it; 0: none."""
    place, split = tl.program_id(0), tl.program_id(1)
    row, length, _ = _num_tokens(drafted, num_drafted, place, num_tokens)
    text = token_table + row * token_stride
    best = tl.zeros([AT_ONCE], tl.int64)
    if tl.load(drafted + 6 * num_drafted + place) > 0:
        for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, length - 1), AT_ONCE):
            end = start + tl.arange(0, AT_ONCE)
            is_equal = end < length - 1
            matched = tl.zeros([AT_ONCE], tl.int32)
            for back in range(LONGEST):
                is_equal = is_equal & (end >= back)
                token = tl.load(text + end - back, mask=is_equal, other=-1)
                is_equal = is_equal & (token == tl.load(text + tl.maximum(length - 1 - back, 0)))
                matched += is_equal.to(tl.int32)
            key = matched.to(tl.int64) * 4294967296 + end + 1
            best = tl.maximum(best, tl.where(matched >= SHORTEST, key, 0))
    tl.store(found + place * tl.num_programs(1) + split, tl.max(best, axis=0))


@triton.jit(do_not_specialize=["num_drafted", "num_splits"])
def begin_drafts_kernel(
    drafted, num_drafted, num_tokens, token_table, token_stride, found, num_splits, seq_lens, sampled_positions,
    SPLITS_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program per row: writes the drafts found after the text of the row, moves the lengths and positions of its
    sequences back by the missing tokens, and stores its length before the step."""
    place = tl.program_id(0)
    row, length, back = _num_tokens(drafted, num_drafted, place, num_tokens)
    text = token_table + row * token_stride
    num_lookups = tl.load(drafted + 6 * num_drafted + place)
    offset = tl.arange(0, AT_ONCE)
    if num_lookups > 0:
        split = tl.arange(0, SPLITS_PADDED)
        keys = tl.load(found + place * num_splits + split, mask=split < num_splits, other=0)
        best = tl.max(keys, axis=0)
        source = tl.where(best > 0, best % 4294967296, length - 1)
        for start in range(0, num_lookups, AT_ONCE):
            draft = start + offset
            inside = draft < num_lookups
            token = tl.load(text + source + draft % (length - source), mask=inside, other=0)
            tl.store(text + length + draft, token, mask=inside)
    first_sequence = tl.load(drafted + 3 * num_drafted + place)
    first_sample = tl.load(drafted + 4 * num_drafted + place)
    num_sequences = tl.load(drafted + 5 * num_drafted + place) + 1
    for start in range(0, num_sequences, AT_ONCE):
        inside = start + offset < num_sequences
        lens, positions = seq_lens + first_sequence + start, sampled_positions + first_sample + start
        tl.store(lens + offset, tl.load(lens + offset, mask=inside, other=0) - back, mask=inside)
        tl.store(positions + offset, tl.load(positions + offset, mask=inside, other=0) - back, mask=inside)
    tl.store(num_tokens + row, length)


@triton.jit(do_not_specialize=["num_drafted"])
def accept_drafts_kernel(
    drafted, num_drafted, num_tokens, token_table, token_stride, token_ids, accepted, AT_ONCE: tl.constexpr
):
    """One program per row: accepted[row] is how many of its first drafts equal the sampled tokens; the row's length
    grows by these and one more."""
    place = tl.program_id(0)
    row = tl.load(drafted + place).to(tl.int64)
    first_sample = tl.load(drafted + 4 * num_drafted + place)
    num_drafts = tl.load(drafted + 5 * num_drafted + place)
    length = tl.load(num_tokens + row)
    count = num_drafts
    for start in range(0, num_drafts, AT_ONCE):
        draft = start + tl.arange(0, AT_ONCE)
        inside = draft < num_drafts
        sampled = tl.load(token_ids + first_sample + draft, mask=inside, other=0)
        wanted = tl.load(token_table + row * token_stride + length + draft, mask=inside, other=0)
        count = tl.minimum(count, tl.min(tl.where(inside & (sampled != wanted), draft, num_drafts), axis=0))
    last = tl.load(token_ids + first_sample + count)
    if (last < 0) & (count > 0):  # broken logits after accepted drafts: the next step begins with them
        count -= 1
    tl.store(accepted + place, count)
    tl.store(num_tokens + row, length + count + 1)
