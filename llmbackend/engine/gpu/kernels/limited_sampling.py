"""Draws among the likeliest tokens on the device: top-k, top-p, min-p.

For: device_sampler.py. Does not know: edits, requests. Invariants: as of sampling.py; what is kept, and in what order
it is drawn from, is as drawing.Limits says.

Most often the kept are among some hundreds of tokens above a bound that the blocks' peaks give; they are collected
once, and the end of the kept and the drawn one are searched for among them. In a flat distribution each is searched for
in the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .logits import slot_of
from .ranking import (
    CANDIDATES,
    LOWEST_KEY,
    collect,
    id_of,
    least_key,
    list_blocks,
    logit_of,
    measure,
    peak_of_rank,
    search,
    search_tile,
)
from .sampling import draws, limited, over_peak
from .sampling_rows import MIN_P, SEED, TEMPERATURE, TOP_K, TOP_P, number, uniform, word

NO_WEIGHT = tl.constexpr(1e-300)
"""Below every float32 weight but zero."""

SLACK = tl.constexpr(1e-5)
"""Far more than sums of the same weights differ by."""

DEPTH = tl.constexpr(110.0)
"""So far below the peak a float32 weight is zero."""


@triton.jit(do_not_specialize=["num_samples"])
def draw_limited_kernel(
    logits, stride, copies, slots, rows, positions, records, peaks, masses, listed, found, token_ids,
    vocab_size, num_blocks, num_samples,
    BLOCKS_PADDED: tl.constexpr, SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Replaces the tokens of samples whose rows draw with limits. listed int32 [samples, BLOCKS_PADDED] and found
    int64 [samples, CANDIDATES]: scratch."""
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    if tl.load(token_ids + sample) < 0:
        return
    slot = slot_of(slots, sample, EDITED)
    blocks = tl.arange(0, BLOCKS_PADDED)
    place = tl.where(slot >= 0, num_samples + slot, sample) * num_blocks + blocks
    infinity = float("inf")
    block_peaks = tl.load(peaks + place, mask=blocks < num_blocks, other=-infinity)
    raw_peak = tl.max(block_peaks, axis=0)
    if (draws(records, row, raw_peak) & limited(records, row)) == 0:
        return
    temperature = number(records, row, TEMPERATURE).to(tl.float32)
    top_k = tl.minimum(word(records, row, TOP_K), vocab_size).to(tl.int32)
    top_p = number(records, row, TOP_P)
    min_p = number(records, row, MIN_P)
    chance = uniform(word(records, row, SEED), tl.load(positions + sample))
    listed += sample * BLOCKS_PADDED
    found += sample * CANDIDATES

    scaled_peaks = tl.div_rn(block_peaks, temperature)
    peak = tl.div_rn(raw_peak, temperature)
    least_weight = tl.minimum(tl.maximum(min_p, NO_WEIGHT), 1.0)
    least = _bound(peak, min_p)
    bounded = (top_k > 0) | (min_p > 0.0)
    high = least_key(peak, SHIFT) + (1 << SHIFT)
    total = min_p * 0.0
    if bounded == 0:
        block_masses = tl.load(masses + place, mask=blocks < num_blocks, other=0.0)
        total = tl.sum(over_peak(block_masses, scaled_peaks, peak), axis=0)
        # All that is lighter than this weighs less than what top_p leaves over, were it the whole vocabulary.
        least = tl.maximum(least, _bound(peak, (1.0 - top_p - SLACK) * total / vocab_size))

    few = tl.maximum(num_blocks // 4, 1)
    guess = peak_of_rank(scaled_peaks, tl.where((top_k > 0) & (top_k <= num_blocks), top_k, few), least, SHIFT)
    guess = tl.where((min_p > 0.0) & (top_k == 0), least, guess)
    cut = least_key(guess, SHIFT)
    num_listed = list_blocks(scaled_peaks, guess, listed)
    count = collect(
        logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed,
        cut, high, found, CANDIDATES, SHIFT, EDITED,
    )  # fmt: skip
    inside = tl.minimum(count, CANDIDATES)
    keys, weights = _found(found, inside, peak, SHIFT)
    mass = tl.sum(weights, axis=0)
    complete = (guess <= least) | ((top_k > 0) & (count >= top_k)) | ((bounded == 0) & (mass >= top_p * total))
    at_once = complete & (count <= CANDIDATES)
    if at_once == 0:
        cut = least_key(least, SHIFT)
        num_listed = list_blocks(scaled_peaks, least, listed)
        count, mass = measure(
            logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed, cut,
            SHIFT, EDITED,
        )  # fmt: skip

    # What ends the kept by their number, then what ends them by their mass, then the drawn one.
    for stage in range(3):
        by_count = stage == 0
        share = top_p * tl.where(bounded, mass, total)
        drawn = tl.minimum(_next(chance * mass), mass)
        target = tl.where(by_count, top_k.to(tl.float64), tl.where(stage == 1, share, drawn))
        wanted = (stage == 2) | (by_count & (top_k > 0) & (count > top_k)) | ((stage == 1) & (top_p < 1.0))
        if wanted:
            low = cut
            top = high
            num_beyond = count * 0
            mass_beyond = mass * 0.0
            if at_once == 0:
                low, top, inside, num_beyond, mass_beyond = search(
                    logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed,
                    num_listed, target, by_count, cut, count, high, found, SHIFT, EDITED,
                )  # fmt: skip
            keys, weights = _found(found, inside, peak, SHIFT)
            ones = (keys > LOWEST_KEY).to(tl.float64)
            sizes = tl.where(by_count, ones, weights)
            before = tl.where(by_count, num_beyond.to(tl.float64), mass_beyond)
            cut = search_tile(keys, sizes, target, before, low, top, SHIFT)
            count = num_beyond + tl.sum((keys >= cut).to(tl.int32), axis=0)
            mass = mass_beyond + tl.sum(tl.where(keys >= cut, weights, 0.0), axis=0)
    tl.store(token_ids + sample, id_of(cut, vocab_size, SHIFT))


@triton.jit
def _found(found, count, peak, SHIFT: tl.constexpr):
    """The keys that were collected, and their weights over the peak."""
    places = tl.arange(0, CANDIDATES)
    there = places < count
    keys = tl.load(found + places, mask=there, other=LOWEST_KEY)
    x = tl.where(there, logit_of(keys, SHIFT), peak)
    return keys, tl.where(there, tl.exp(x - peak).to(tl.float64), 0.0)


@triton.jit
def _bound(peak, weight):
    """A logit below which none has this weight, or any at all; a little lower than need be, and below the peak."""
    depth = tl.log(tl.maximum(tl.minimum(weight, 1.0).to(tl.float32), 1e-37)) - 1e-3
    depth = tl.where(weight > 1e-37, depth, -DEPTH)
    bound = peak + depth - tl.abs(peak) * 1e-6
    return tl.maximum(bound, -3.4e38)


@triton.jit
def _next(x):
    """The float64 above x, which is not negative."""
    return (x.to(tl.int64, bitcast=True) + 1).to(tl.float64, bitcast=True)
