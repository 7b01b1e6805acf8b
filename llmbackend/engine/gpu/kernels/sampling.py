"""From logits to tokens on the device: the likeliest, or one drawn from the whole distribution, in one pass.

For: device_sampler.py. Does not know: limits (limited_sampling.py), edits, requests. Invariants: the definitions are
those of ../../drawing.py; a sample depends on its logits, its row's record and its position alone; sums have a fixed
order, so that the same logits give the same token in every batch.

First each block of 256 logits is summed up (its largest, and its mass), by many programs; then one program per sample
chooses the block and looks for the token inside. Masses are float64 sums of float32 weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits import BLOCK, NO_ROOM, load_logits, slot_of
from .sampling_rows import MIN_P, NUM_LOGPROBS, SEED, TEMPERATURE, TOP_K, TOP_P, number, uniform, word

BLOCKS_AT_ONCE = 16


@triton.jit(do_not_specialize=["num_samples"])
def summarise_kernel(
    logits, stride, copies, slots, rows, records, peaks, masses, unit_masses, vocab_size, num_blocks, num_samples,
    BLOCKS: tl.constexpr, EDITED: tl.constexpr, UNIT_MASSES: tl.constexpr,
):  # fmt: skip
    """Of each block: its peak float32; its mass float64 at the row's temperature, over its own peak, where the draw
    wants it; with UNIT_MASSES also that at temperature 1, where logprobs want it. EDITED: of copies alone."""
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
    """The likeliest token of each sample, or, where its row wants that and sets no limit, a drawn one; -1 where the
    model's logits hold a NaN or an infinity, and for padding."""
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
    """Whether a row draws: a temperature that takes its peak beyond all numbers leaves no choice."""
    temperature = number(records, row, TEMPERATURE).to(tl.float32)
    scaled = tl.div_rn(peak, tl.where(temperature > 0.0, temperature, 1.0))
    return (temperature > 0.0) & (tl.abs(scaled) < float("inf"))


@triton.jit
def limited(records, row):
    """Whether a row draws among some tokens alone."""
    bounded = (word(records, row, TOP_K) > 0) | (number(records, row, MIN_P) > 0.0)
    return bounded | (number(records, row, TOP_P) < 1.0)


@triton.jit
def over_peak(block_masses, block_peaks, peak):
    """Masses over their blocks' peaks -> over the row's."""
    return block_masses * tl.exp((block_peaks - peak).to(tl.float64))


@triton.jit
def first_of(numbers, wanted, otherwise):
    """The smallest of the numbers (a tile of rising ones) that is wanted; `otherwise` if there is none."""
    first = tl.min(tl.where(wanted, numbers, 0x7FFFFFFF), axis=0)
    return tl.where(first == 0x7FFFFFFF, otherwise, first)


@triton.jit
def last_of(numbers, wanted):
    return tl.max(tl.where(wanted, numbers, 0), axis=0)
