"""Sampling that needs tokens ranked by likelihood: draws with top-k, top-p and min-p, and logprobs with ranks.

Used by device_sampler.py. Invariants: as in sampling.py; which tokens a draw keeps, and in which order it draws, is
defined by torch_sampling.Limits; logprobs are of the model's own logits, without edits or temperature, and the most
likely tokens are returned as rank keys, unordered.

Usually the kept tokens are among a few hundred above a bound given by the peaks of the blocks; those are collected
once, and searched for the end of the kept tokens and for the drawn one. For flatter rows, many programs collect the two
relevant parts of the ranking (narrowing.py), and the search is the same. Only if these are too large, or top_k is very
large, does one program search the whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .narrowing import (
    ALL_MASS,
    BY_COUNT,
    DRAWN_BIN,
    END_BIN,
    HIGH,
    IS_NARROWED,
    IS_READY,
    LOW,
    MASS_BEYOND,
    NUM_INSIDE,
    TOTAL,
    first_guess,
    least_logit,
    least_weight_of,
    limits_of,
    peaks_of,
    planned,
    planned_number,
)
from .ranking import (
    CANDIDATES,
    LOWEST_KEY,
    collect,
    id_of,
    least_key,
    list_blocks,
    logit_of,
    measure,
    peak_that_reaches,
    search,
    search_tile,
)
from .sampling import NUM_LOGPROBS, SEED, WORDS, draws, limited, over_peak, slot_of, uniform, word


@triton.jit(do_not_specialize=["num_samples"])
def draw_limited_kernel(
    logits, stride, copies, slots, rows, positions, records, peaks, masses, plans, bins, listed, found, token_ids,
    vocab_size, num_blocks, num_samples,
    BLOCKS_PADDED: tl.constexpr, ROOM: tl.constexpr, SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Replaces the tokens of samples whose rows draw with limits. plans, bins: as written by narrowing.py. listed int32
    [samples, BLOCKS_PADDED] and found int64 [samples, CANDIDATES]: scratch."""
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    if tl.load(token_ids + sample) < 0:
        return
    slot = slot_of(slots, sample, EDITED)
    place, known, block_peaks = peaks_of(peaks, sample, slot, num_blocks, num_samples, BLOCKS_PADDED)
    raw_peak = tl.max(block_peaks, axis=0)
    if (draws(records, row, raw_peak) & limited(records, row)) == 0:
        return
    temperature, top_k, top_p, min_p, bounded = limits_of(records, row, vocab_size)
    chance = uniform(word(records, row, SEED), tl.load(positions + sample))
    peak = tl.div_rn(raw_peak, temperature)
    is_narrowed = planned(plans, sample, IS_NARROWED) != 0
    if is_narrowed:
        if planned(plans, sample, IS_READY) != 0:
            key = _draw_from_bins(
                plans, bins + sample * 2 * ROOM, sample, peak, bounded, top_k, top_p, chance, ROOM, SHIFT
            )
            tl.store(token_ids + sample, id_of(key, vocab_size, SHIFT))
            return

    listed += sample * BLOCKS_PADDED
    found += sample * CANDIDATES
    scaled_peaks = tl.div_rn(block_peaks, temperature)
    least_weight = least_weight_of(records, row)
    high = least_key(peak, SHIFT) + (1 << SHIFT)
    least, total = least_logit(masses + place, known, scaled_peaks, peak, bounded, top_p, min_p, vocab_size)

    cut, count, mass, inside, at_once, num_listed = _first_cut(
        logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, scaled_peaks, num_blocks,
        top_k, top_p, min_p, bounded, total, least, high, is_narrowed, listed, found, SHIFT, EDITED,
    )  # fmt: skip
    # First where the kept tokens end by number, then where they end by mass, then the drawn one.
    for stage in range(3):
        by_count = stage == 0
        target = _target(stage, top_k, top_p, bounded, mass, total, chance)
        wanted = (stage == 2) | (by_count & (top_k > 0) & (count > top_k)) | ((stage == 1) & (top_p < 1.0))
        if wanted:
            cut, count, mass = _cut_at(
                logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed,
                target, by_count, cut, count, mass, high, found, inside, at_once, SHIFT, EDITED,
            )  # fmt: skip
    tl.store(token_ids + sample, id_of(cut, vocab_size, SHIFT))


@triton.jit
def _target(stage, top_k, top_p, bounded, mass, total, chance):
    """The number or mass of the keys down to the one searched for. mass: of the tokens kept so far."""
    share = top_p * tl.where(bounded, mass, total)
    drawn = tl.minimum(_next(chance * mass), mass)
    return tl.where(stage == 0, top_k.to(tl.float64), tl.where(stage == 1, share, drawn))


@triton.jit
def _draw_from_bins(plans, bins, sample, peak, bounded, top_k, top_p, chance, ROOM: tl.constexpr, SHIFT: tl.constexpr):
    """The drawn key, from the bin in which the kept tokens end and the bin that contains it."""
    total = planned_number(plans, sample, TOTAL)
    mass = planned_number(plans, sample, ALL_MASS)
    cut = planned(plans, sample, IS_READY) * 0 + LOWEST_KEY
    is_one_bin = planned(plans, sample, END_BIN + LOW) == planned(plans, sample, DRAWN_BIN + LOW)
    places = tl.arange(0, ROOM)
    for stage in range(3):
        which = tl.where(stage == 2, DRAWN_BIN, END_BIN)
        there = places < planned(plans, sample, which + NUM_INSIDE)
        place = tl.where((stage == 2) & (is_one_bin == 0), ROOM, 0)
        by_count = stage == 0
        wanted = (stage == 2) | (by_count & (planned(plans, sample, BY_COUNT) != 0)) | ((stage == 1) & (top_p < 1.0))
        if wanted:
            keys, weights = _weighted(bins + place + places, there, peak, SHIFT)
            before = tl.where(by_count, 0.0, planned_number(plans, sample, which + MASS_BEYOND))
            cut = search_tile(
                keys, tl.where(by_count, there.to(tl.float64), weights),
                _target(stage, top_k, top_p, bounded, mass, total, chance), before,
                tl.maximum(cut, planned(plans, sample, which + LOW)), planned(plans, sample, which + HIGH), SHIFT,
            )  # fmt: skip
            mass = before + tl.sum(tl.where(keys >= cut, weights, 0.0), axis=0)
    return cut


@triton.jit
def _first_cut(
    logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, scaled_peaks, num_blocks,
    top_k, top_p, min_p, bounded, total, least, high, is_narrowed, listed, found,
    SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Collects the keys above a guessed bound in `found`; if those do not cover all that can be kept, or are known to
    be many, measures all keys above the lowest bound instead.

    Returns the bound as a key, the count and mass of keys from it on, how many are in `found`, whether these are all,
    and the number of blocks with such keys.
    """
    guess, _ = first_guess(scaled_peaks, peak, least, total, bounded, num_blocks, top_k, top_p, min_p, SHIFT)
    guess = tl.where(is_narrowed, float("inf"), guess)
    cut = least_key(guess, SHIFT)
    num_listed = list_blocks(scaled_peaks, guess, listed)
    count = collect(
        logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed,
        cut, high, found, CANDIDATES, SHIFT, EDITED,
    )  # fmt: skip
    inside = tl.minimum(count, CANDIDATES)
    _, weights = _found(found, inside, peak, SHIFT)
    mass = tl.sum(weights, axis=0)
    complete = (guess <= least) | ((top_k > 0) & (count >= top_k)) | ((bounded == 0) & (mass >= top_p * total))
    at_once = complete & (count <= CANDIDATES) & (is_narrowed == 0)
    if at_once == 0:
        cut = least_key(least, SHIFT)
        num_listed = list_blocks(scaled_peaks, least, listed)
        count, mass = measure(
            logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed, cut,
            SHIFT, EDITED,
        )  # fmt: skip
    return cut, count, mass, inside, at_once, num_listed


@triton.jit
def _cut_at(
    logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed,
    target, by_count, cut, count, mass, high, found, inside, at_once, SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """The largest key at which the count (or mass) of the keys from it on reaches the target, and both from it on.

    cut, count, mass: the same so far. inside: how many keys are in `found`; all relevant ones, if at_once.
    """
    low = cut
    top = high
    num_beyond = count * 0
    mass_beyond = mass * 0.0
    if at_once == 0:
        low, top, inside, num_beyond, mass_beyond = search(
            logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed,
            target, by_count, cut, count, high, found, SHIFT, EDITED,
        )  # fmt: skip
    keys, weights = _found(found, inside, peak, SHIFT)
    ones = (keys > LOWEST_KEY).to(tl.float64)
    sizes = tl.where(by_count, ones, weights)
    before = tl.where(by_count, num_beyond.to(tl.float64), mass_beyond)
    cut = search_tile(keys, sizes, target, before, low, top, SHIFT)
    count = num_beyond + tl.sum((keys >= cut).to(tl.int32), axis=0)
    mass = mass_beyond + tl.sum(tl.where(keys >= cut, weights, 0.0), axis=0)
    return cut, count, mass


@triton.jit
def _found(found, count, peak, SHIFT: tl.constexpr):
    """The collected keys, and their weights relative to the peak."""
    places = tl.arange(0, CANDIDATES)
    return _weighted(found + places, places < count, peak, SHIFT)


@triton.jit
def _weighted(places, there, peak, SHIFT: tl.constexpr):
    """Keys in memory, and their weights relative to the peak; LOWEST_KEY and 0 if there is none."""
    keys = tl.load(places, mask=there, other=LOWEST_KEY)
    x = tl.where(there, logit_of(keys, SHIFT), peak)
    return keys, tl.where(there, tl.exp(x - peak).to(tl.float64), 0.0)


@triton.jit
def _next(x):
    """The next float64 above x, which is not negative."""
    return (x.to(tl.int64, bitcast=True) + 1).to(tl.float64, bitcast=True)


_ANY_WEIGHT = tl.constexpr(-1.0)
_LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit(do_not_specialize=["top_width"])
def logprobs_kernel(
    logits, stride, rows, records, peaks, unit_masses, listed, found, token_ids,
    asked, own_logprobs, ranks, norms, top_keys, top_width, vocab_size, num_blocks,
    BLOCKS_PADDED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """asked int32: number of top logprobs requested by a sample's row, -1 = no logprobs. norms float64: normaliser of
    the distribution. top_keys int64 [samples, top_width], padded with LOWEST_KEY; empty if the width is 0."""
    sample = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sample)
    token_id = tl.load(token_ids + sample)
    wants = tl.load(records + row.to(tl.int64) * WORDS + NUM_LOGPROBS, mask=token_id >= 0, other=-1)
    count = wants.to(tl.int32)
    tl.store(asked + sample, count)
    if count < 0:
        return
    listed += sample * BLOCKS_PADDED
    found += sample * CANDIDATES
    blocks = tl.arange(0, BLOCKS_PADDED)
    place = sample * num_blocks + blocks
    known = blocks < num_blocks
    block_peaks = tl.load(peaks + place, mask=known, other=float("-inf"))
    peak = tl.max(block_peaks, axis=0)
    total = tl.sum(over_peak(tl.load(unit_masses + place, mask=known, other=0.0), block_peaks, peak), axis=0)
    norm = peak.to(tl.float64) + tl.log(total)
    own = tl.load(logits + sample * stride + token_id).to(tl.float32)
    tl.store(norms + sample, norm)
    tl.store(own_logprobs + sample, (own.to(tl.float64) - norm).to(tl.float32))

    # A token above the chosen one is above all keys with its logit.
    above = least_key(own, SHIFT) + (1 << SHIFT)
    high = least_key(peak, SHIFT) + (1 << SHIFT)
    num_listed = list_blocks(block_peaks, own, listed)
    num_above, _ = measure(
        logits, stride, logits, sample, sample, vocab_size, 1.0, peak, _ANY_WEIGHT, listed, num_listed, above,
        SHIFT, False,
    )  # fmt: skip
    tl.store(ranks + sample, num_above + 1)
    if (count == 0) | (top_width == 0):
        return
    _collect_top(
        logits, stride, sample, vocab_size, peak, block_peaks, count, high, listed, found,
        top_keys + sample * top_width, SHIFT,
    )  # fmt: skip


@triton.jit
def _collect_top(
    logits, stride, sample, vocab_size, peak, block_peaks, count, high, listed, found, top_keys, SHIFT: tl.constexpr
):
    """Writes the keys of the `count` most likely tokens, unordered."""
    ones = tl.full((block_peaks.shape[0],), 1.0, tl.float64)
    guess = peak_that_reaches(block_peaks, ones, count.to(tl.float64), _LEAST, SHIFT)
    low = least_key(guess, SHIFT)
    num_listed = list_blocks(block_peaks, guess, listed)
    num_low, _ = measure(
        logits, stride, logits, sample, sample, vocab_size, 1.0, peak, _ANY_WEIGHT, listed, num_listed, low,
        SHIFT, False,
    )  # fmt: skip
    if num_low < count:
        low = least_key(float("-inf"), SHIFT)
        num_listed = list_blocks(block_peaks, float("-inf"), listed)
        num_low = vocab_size
    target = count.to(tl.float64)
    interval_low, interval_high, inside, num_beyond, _ = search(
        logits, stride, logits, sample, sample, vocab_size, 1.0, peak, _ANY_WEIGHT, listed, num_listed,
        target, True, low, num_low, high, found, SHIFT, False,
    )  # fmt: skip
    places = tl.arange(0, CANDIDATES)
    keys = tl.load(found + places, mask=places < inside, other=LOWEST_KEY)
    ones = (keys > LOWEST_KEY).to(tl.float64)
    last = search_tile(keys, ones, target, num_beyond.to(tl.float64), interval_low, interval_high, SHIFT)
    collect(
        logits, stride, logits, sample, sample, vocab_size, 1.0, peak, _ANY_WEIGHT, listed, num_listed, last, high,
        top_keys, count, SHIFT, False,
    )  # fmt: skip
