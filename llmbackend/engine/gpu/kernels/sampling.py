"""From logits to tokens on the device: reading rows and logits, editing logits, drawing from the whole distribution.

Used by device_sampler.py, which writes the records, and by the other sampling kernels; draws with limits are in
ranked_sampling.py. Invariants: the definitions are those of engine/sampling (sampler.py, torch_sampling.py); a sample
depends only on its logits, its row's record, its row's tokens and its position; sums have a fixed order, so the same
logits give the same token in every batch. NaN is read as plus infinity, so that a maximum reveals it; everything beyond
the vocabulary is minus infinity.

Only samples whose rows change their logits (bias, forbidden stops, penalties) get a float32 copy first; counts of
tokens are zero between steps. Then many programs summarise each block of 256 logits (its largest, and its mass), and
one program per sample chooses the block and finds the token inside. Masses are float64 sums of float32 weights.
Summaries of the edited copies follow those of the samples' own logits.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

from ... import token_masks

RECORD = np.dtype(
    [
        ("temperature", np.float64),  # a float32's value; 0: greedy
        ("seed", np.uint64),
        ("top_k", np.int64),  # 0: no limit
        ("top_p", np.float64),  # 1: no limit
        ("min_p", np.float64),  # 0: no limit
        ("num_logprobs", np.int64),  # -1: none
        ("has_edits", np.int64),
        ("min_tokens", np.int64),
        ("repetition_penalty", np.float64),  # a float32's value; 1: none
        ("frequency_penalty", np.float64),
        ("presence_penalty", np.float64),
        ("bias_begin", np.int64),  # in the lists of ids and values that all rows share
        ("bias_end", np.int64),
        ("stop_begin", np.int64),
        ("stop_end", np.int64),
    ]
)
NUM_WORDS = RECORD.itemsize // 8
WORDS = tl.constexpr(NUM_WORDS)
TEMPERATURE, SEED, TOP_K, TOP_P, MIN_P, NUM_LOGPROBS, HAS_EDITS, MIN_TOKENS = (tl.constexpr(i) for i in range(8))
REPETITION, FREQUENCY, PRESENCE, BIAS_BEGIN, BIAS_END, STOP_BEGIN, STOP_END = (tl.constexpr(i) for i in range(8, 15))


@triton.jit
def word(records, row, which):
    """int64"""
    return tl.load(records + row.to(tl.int64) * WORDS + which)


@triton.jit
def number(records, row, which):
    """float64"""
    return word(records, row, which).to(tl.float64, bitcast=True)


@triton.jit
def uniform(seed, position):
    """float64 in [0, 1) for the 64 bits of a seed and a position, as in sampling/rows.py."""
    mixed = position.to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = _splitmix64(_splitmix64(seed.to(tl.uint64, bitcast=True)) ^ mixed)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _splitmix64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


BLOCK = tl.constexpr(256)

NO_SLOT = tl.constexpr(-1)
"""Slot of a sample whose logits are not edited."""

NO_ROOM = tl.constexpr(-2)
"""Slot of a sample that got no copy: a padding sample, because there is a copy for each row that needs one."""


@triton.jit
def slot_of(slots, sample, EDITED: tl.constexpr):
    """The copy with the logits of a sample."""
    if EDITED:
        slot = tl.load(slots + sample).to(tl.int64)
    else:
        slot = sample * 0 + NO_SLOT
    return slot


@triton.jit
def load_logits(logits, stride, copies, sample, slot, vocab_size, ids, mask, EDITED: tl.constexpr):
    """float32, of the ids where mask is true; sample, slot int64."""
    inside = mask & (ids < vocab_size)
    infinity = float("inf")
    if EDITED:
        own = tl.load(logits + sample * stride + ids, mask=inside & (slot < 0), other=-infinity).to(tl.float32)
        copied = tl.load(copies + slot * vocab_size + ids, mask=inside & (slot >= 0), other=-infinity)
        x = tl.where(slot >= 0, copied, own)
    else:
        x = tl.load(logits + sample * stride + ids, mask=inside, other=-infinity).to(tl.float32)
    return tl.where(x == x, x, infinity)


BLOCKS_AT_ONCE = 16

FORBIDDEN = tl.constexpr(token_masks.FORBIDDEN)


IDS_AT_ONCE = tl.constexpr(256)
_TOKENS_AT_ONCE = tl.constexpr(1024)
_IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["num_samples", "num_copies"])
def slots_kernel(rows, records, slots, num_samples, num_copies, SAMPLES_PADDED: tl.constexpr):
    """Assigns copies to the samples that need one, in their order."""
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


@triton.jit(do_not_specialize=["num_masked"])
def mask_kernel(slots, copies, index, words, words_stride, vocab_size, num_masked, BLOCKS: tl.constexpr):
    """Forbids tokens in the copies by the masks. index int32 [num_masked]: each sample's row of words, -1 = none."""
    sample = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + sample).to(tl.int64)
    which = tl.load(index + sample, mask=sample < num_masked, other=-1).to(tl.int64)
    if (slot < 0) | (which < 0):
        return
    ids = tl.program_id(1) * BLOCKS * BLOCK + tl.arange(0, BLOCKS * BLOCK)
    inside = ids < vocab_size
    word = tl.load(words + which * words_stride + (ids >> 5), mask=inside, other=-1)
    is_forbidden = inside & (((word >> (ids & 31)) & 1) == 0)
    tl.store(copies + slot * vocab_size + ids, tl.full((BLOCKS * BLOCK,), FORBIDDEN, tl.float32), mask=is_forbidden)


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
    """Counts how often each token was generated, and marks prompt tokens."""
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
    """Penalises each token once, at the occurrence that takes its count, which is zero afterwards."""
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


@triton.jit(do_not_specialize=["num_samples"])
def summarise_kernel(
    logits, stride, copies, slots, rows, records, peaks, masses, unit_masses, vocab_size, num_blocks, num_samples,
    BLOCKS: tl.constexpr, EDITED: tl.constexpr, UNIT_MASSES: tl.constexpr,
):  # fmt: skip
    """For each block: its peak float32; its mass float64 at the row's temperature, relative to its own peak, if the
    draw needs it; with UNIT_MASSES also that at temperature 1, if logprobs need it. EDITED: only for copies."""
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    slot = slot_of(slots, sample, EDITED)
    if row < 0 or (EDITED and slot < 0):
        return
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = load_logits(logits, stride, copies, sample, slot, vocab_size, ids, ids >= 0, EDITED)
    peak = tl.max(x, axis=1)
    place = tl.where(slot >= 0, num_samples + slot, sample) * num_blocks + block
    known = block < num_blocks
    tl.store(peaks + place, peak, mask=known)
    temperature = number(records, row, TEMPERATURE).to(tl.float32)
    bounded = (word(records, row, TOP_K) > 0) | (number(records, row, MIN_P) > 0.0)
    if (temperature > 0.0) & (bounded == 0):
        tl.store(masses + place, _mass(tl.div_rn(x, temperature), tl.div_rn(peak, temperature)), mask=known)
    if UNIT_MASSES:
        if word(records, row, NUM_LOGPROBS) >= 0:
            tl.store(unit_masses + place, _mass(x, peak), mask=known)


@triton.jit
def _mass(x, peak):
    base = tl.where(tl.abs(peak) < float("inf"), peak, 0.0)
    return tl.sum(tl.exp(tl.minimum(x - base[:, None], 0.0)).to(tl.float64), axis=1)


@triton.jit(do_not_specialize=["num_samples"])
def choose_kernel(
    logits, stride, copies, slots, rows, positions, records, peaks, masses, token_ids,
    vocab_size, num_blocks, num_samples,
    BLOCKS_PADDED: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """The most likely token of each sample, or a drawn one if its row draws without a limit; -1 for padding and if the
    model's logits contain a NaN or an infinity."""
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    slot = slot_of(slots, sample, EDITED)
    blocks = tl.arange(0, BLOCKS_PADDED)
    known = (blocks < num_blocks) & (row >= 0)
    infinity = float("inf")
    if EDITED:
        own_peak = tl.max(tl.load(peaks + sample * num_blocks + blocks, mask=known, other=-infinity), axis=0)
    place = tl.where(slot >= 0, num_samples + slot, sample) * num_blocks + blocks
    block_peaks = tl.load(peaks + place, mask=known, other=-infinity)
    peak = tl.max(block_peaks, axis=0)
    sound = tl.abs(peak) < infinity
    if EDITED:
        sound = (tl.abs(own_peak) < infinity) & (slot != NO_ROOM)
    if (row < 0) | (sound == 0):
        tl.store(token_ids + sample, -1)
        return
    block = first_of(blocks, block_peaks == peak, 0)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits, stride, copies, sample, slot, vocab_size, ids, ids >= 0, EDITED)
    token_id = first_of(ids, x == peak, 0)
    if draws(records, row, peak) & (limited(records, row) == 0):
        temperature = number(records, row, TEMPERATURE).to(tl.float32)
        scaled_peak = tl.div_rn(peak, temperature)
        block_masses = tl.load(masses + place, mask=known, other=0.0)
        block_masses = over_peak(block_masses, tl.div_rn(block_peaks, temperature), scaled_peak)
        upto = tl.cumsum(block_masses, axis=0)
        target = uniform(word(records, row, SEED), tl.load(positions + sample)) * tl.max(upto, axis=0)
        block = first_of(blocks, (upto > target) & (block_masses > 0.0), last_of(blocks, block_masses > 0.0))
        rest = target - tl.sum(tl.where(blocks == block, upto - block_masses, 0.0), axis=0)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        x = load_logits(logits, stride, copies, sample, slot, vocab_size, ids, ids >= 0, EDITED)
        weights = tl.exp(tl.div_rn(x, temperature) - scaled_peak).to(tl.float64)
        token_id = first_of(ids, (tl.cumsum(weights, axis=0) > rest) & (weights > 0.0), last_of(ids, weights > 0.0))
    tl.store(token_ids + sample, token_id)


@triton.jit
def draws(records, row, peak):
    """Whether a row draws. A row whose temperature makes its scaled peak infinite is greedy."""
    temperature = number(records, row, TEMPERATURE).to(tl.float32)
    scaled = tl.div_rn(peak, tl.where(temperature > 0.0, temperature, 1.0))
    return (temperature > 0.0) & (tl.abs(scaled) < float("inf"))


@triton.jit
def limited(records, row):
    """Whether a row draws with a limit."""
    bounded = (word(records, row, TOP_K) > 0) | (number(records, row, MIN_P) > 0.0)
    return bounded | (number(records, row, TOP_P) < 1.0)


@triton.jit
def over_peak(block_masses, block_peaks, peak):
    """Converts masses relative to the peaks of their blocks to masses relative to the peak of the row."""
    return block_masses * tl.exp((block_peaks - peak).to(tl.float64))


@triton.jit
def first_of(numbers, wanted, otherwise):
    """The smallest wanted number; `otherwise` if there is none."""
    first = tl.min(tl.where(wanted, numbers, 0x7FFFFFFF), axis=0)
    return tl.where(first == 0x7FFFFFFF, otherwise, first)


@triton.jit
def last_of(numbers, wanted):
    return tl.max(tl.where(wanted, numbers, 0), axis=0)
