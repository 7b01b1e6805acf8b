"""What requests change about their logits, on the device: bias, forbidden stops, penalties; in copies of the logits.

For: device_sampler.py. Does not know: temperature, limits. Invariants: the definitions are those of
../../sampling/logit_edits.py; only samples whose rows ask for a change are copied; a copy's numbers depend on its
sample's logits, its row's record and the row's tokens before its position alone; counts are zero between steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits import BLOCK, NO_ROOM, NO_SLOT
from .sampling_rows import (
    BIAS_BEGIN,
    BIAS_END,
    FREQUENCY,
    HAS_EDITS,
    MIN_TOKENS,
    PRESENCE,
    REPETITION,
    STOP_BEGIN,
    STOP_END,
    WORDS,
    number,
    word,
)

IDS_AT_ONCE = tl.constexpr(256)
_TOKENS_AT_ONCE = tl.constexpr(1024)
_IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["num_samples", "num_copies"])
def slots_kernel(rows, records, slots, num_samples, num_copies, SAMPLES_PADDED: tl.constexpr):
    """Gives copies to the samples that need one, in their order."""
    samples = tl.arange(0, SAMPLES_PADDED)
    row = tl.load(rows + samples, mask=samples < num_samples, other=-1)
    edited = tl.load(records + row.to(tl.int64) * WORDS + HAS_EDITS, mask=row >= 0, other=0) != 0
    place = tl.cumsum(edited.to(tl.int32), axis=0) - 1
    slot = tl.where(edited, tl.where(place < num_copies, place, NO_ROOM), NO_SLOT)
    tl.store(slots + samples, slot, mask=samples < num_samples)


@triton.jit
def copy_kernel(logits, stride, slots, copies, vocab_size, BLOCKS: tl.constexpr):
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sample).to(tl.int64)
    if slot < 0:
        return
    ids = tl.program_id(1) * BLOCKS * BLOCK + tl.arange(0, BLOCKS * BLOCK)
    inside = ids < vocab_size
    x = tl.load(logits + sample * stride + ids, mask=inside, other=0.0)
    tl.store(copies + slot * vocab_size + ids, x.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["values"])
def edit_kernel(
    rows, positions, records, slots, copies, counts, ids, values, token_table, table_stride, num_prompt_tokens,
    vocab_size,
):  # fmt: skip
    """One program per sample. counts int32 [copies, vocab_size], zeros; ids int32 and values float32: the lists of all
    rows' biases and stops."""
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sample).to(tl.int64)
    if slot < 0:
        return
    row = tl.load(rows + sample)
    position = tl.load(positions + sample)
    num_prompt = tl.load(num_prompt_tokens + row)
    copy = copies + slot * vocab_size
    _add(copy, ids, values, word(records, row, BIAS_BEGIN), word(records, row, BIAS_END))
    tl.debug_barrier()
    if position - num_prompt < word(records, row, MIN_TOKENS):
        _forbid(copy, ids, word(records, row, STOP_BEGIN), word(records, row, STOP_END))
    repetition = number(records, row, REPETITION).to(tl.float32)
    frequency = number(records, row, FREQUENCY)
    presence = number(records, row, PRESENCE)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        tokens = token_table + row.to(tl.int64) * table_stride
        begin = tl.where(repetition != 1.0, 0, num_prompt)
        tl.debug_barrier()
        _count(tokens, begin, num_prompt, position, counts + slot * vocab_size, vocab_size)
        tl.debug_barrier()
        _penalise(
            copy, tokens, begin, position, counts + slot * vocab_size, vocab_size, repetition, frequency, presence
        )


@triton.jit
def _add(copy, ids, values, begin, end):
    first = begin
    while first < end:
        places = first + tl.arange(0, IDS_AT_ONCE)
        named = tl.load(ids + places, mask=places < end, other=0)
        x = tl.load(copy + named, mask=places < end, other=0.0)
        tl.store(copy + named, x + tl.load(values + places, mask=places < end, other=0.0), mask=places < end)
        first += IDS_AT_ONCE


@triton.jit
def _forbid(copy, ids, begin, end):
    first = begin
    while first < end:
        places = first + tl.arange(0, IDS_AT_ONCE)
        named = tl.load(ids + places, mask=places < end, other=0)
        tl.store(copy + named, tl.full((IDS_AT_ONCE,), float("-inf"), tl.float32), mask=places < end)
        first += IDS_AT_ONCE


@triton.jit
def _count(tokens, begin, num_prompt, end, counts, vocab_size):
    """How often each token was put out, and whether it was in the prompt."""
    first = begin
    while first < end:
        places = first + tl.arange(0, _TOKENS_AT_ONCE)
        token = tl.load(tokens + places, mask=places < end, other=-1)
        known = (token >= 0) & (token < vocab_size)
        tl.atomic_add(
            counts + token, tl.full((_TOKENS_AT_ONCE,), 1, tl.int32), mask=known & (places >= num_prompt), sem="relaxed"
        )
        tl.atomic_or(
            counts + token,
            tl.full((_TOKENS_AT_ONCE,), _IN_PROMPT, tl.int32),
            mask=known & (places < num_prompt),
            sem="relaxed",
        )
        first += _TOKENS_AT_ONCE


@triton.jit
def _penalise(copy, tokens, begin, end, counts, vocab_size, repetition, frequency, presence):
    """Each token once: by whoever takes its count, which is zero then."""
    first = begin
    while first < end:
        places = first + tl.arange(0, _TOKENS_AT_ONCE)
        token = tl.load(tokens + places, mask=places < end, other=-1)
        known = (token >= 0) & (token < vocab_size)
        count = tl.atomic_xchg(counts + token, tl.zeros_like(token), mask=known, sem="relaxed")
        mine = known & (count != 0)
        num_outputs = tl.where(mine, count & (_IN_PROMPT - 1), 0)
        x = tl.load(copy + token, mask=mine, other=0.0)
        x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
        amount = (frequency * num_outputs.to(tl.float64) + presence).to(tl.float32)
        x = tl.where(num_outputs > 0, x - amount, x)
        tl.store(copy + token, x, mask=mine)
        first += _TOKENS_AT_ONCE
