"""Finds the part of a row's ranking in which a draw ends, with many programs per row.

Launched by device_sampler.py; ranked_sampling.py draws from the collected keys. A sample of the row yields pivots that
divide its ranking into PIVOTS bins of about equally many tokens, for any distribution. Programs count and weigh their
own splits of the vocabulary at every pivot; the sums over the splits show the bin in which the kept tokens end, and the
one with the drawn token, and only these are collected. Two passes over the row, shared by all programs; blocks in which
no token can be kept are not read.

Invariants: splits and their order depend only on the vocabulary, so no sum depends on the number of programs; collected
keys are in the order of ids; every decision is made in one place and stored in the row's plan, because the last bit of
a sum may differ in another kernel. A row's plan is READY only if the bins are certain to contain everything that the
draw needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ranking import LOWEST_KEY, keys_at, least_key, logit_of, peak_that_reaches
from .sampling import (
    BLOCK,
    MIN_P,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    draws,
    first_of,
    limited,
    number,
    over_peak,
    slot_of,
    uniform,
    word,
)

TOKENS_PER_BIN = 5000
"""Maximum average."""
ROOM = 8192
"""Maximum number of collected keys per bin. A bin of 5000 tokens on average, delimited by each 32nd sampled key, has
more once in a thousand times; one program then searches the row."""
FEWEST_PIVOTS = 16
SPLIT_BLOCKS = 16
"""Blocks of the vocabulary that one program counts."""
SPLITS_TO_COLLECT = 4
"""Splits from which one program collects: each reads the counts of all splits."""
RANKING_PROGRAMS = 8

SAMPLED_PER_PIVOT = tl.constexpr(32)
_RUN = tl.constexpr(4)
"""Neighbours that are sampled together."""
_OTHERS = tl.constexpr(32)
"""Sampled keys with which a program's own are compared at a time."""
_CHUNK = tl.constexpr(64)
"""Keys compared with all pivots at a time: as many as registers allow with three concurrent programs."""

PLAN_WORDS = 16
_WORDS = tl.constexpr(PLAN_WORDS)
IS_NARROWED, PEAK, LEAST, TOTAL, IS_READY, BY_COUNT, ALL_MASS = (tl.constexpr(i) for i in range(7))
"""Words of a plan, int64 or the bits of a float64: whether many programs search this row; its peak, lowest logit that
matters and mass, all at its temperature; whether the bins suffice; whether top_k ends what is kept; mass of all that
min_p keeps."""
END_BIN, DRAWN_BIN = (tl.constexpr(i) for i in (7, 11))
"""Then, for the bin in which the kept tokens end and for that of the drawn token:"""
LOW, HIGH, NUM_INSIDE, MASS_BEYOND = (tl.constexpr(i) for i in range(4))

NO_WEIGHT = tl.constexpr(1e-300)
"""Below every float32 weight but zero."""
_SLACK = tl.constexpr(1e-5)
"""Far more than the difference between sums of the same weights in different orders."""
_ROUNDING = tl.constexpr(1e-12)
"""More than the relative difference between float64 sums of a row in different orders."""
_DEPTH = tl.constexpr(110.0)
"""At this distance below the peak a float32 weight is zero."""


def num_pivots(vocab_size: int) -> int:
    return max(FEWEST_PIVOTS, int(triton.next_power_of_2(triton.cdiv(vocab_size, TOKENS_PER_BIN))))


def keys_to_rank(pivots: int) -> int:
    """Sampled keys that each program ranks."""
    return int(pivots * SAMPLED_PER_PIVOT.value // RANKING_PROGRAMS)


@triton.jit
def planned(plans, sample, which):
    """int64"""
    return tl.load(plans + sample * _WORDS + which)


@triton.jit
def planned_number(plans, sample, which):
    """float64"""
    return planned(plans, sample, which).to(tl.float64, bitcast=True)


@triton.jit
def _plan(plans, sample, which, value, mask):
    tl.store(plans + sample * _WORDS + which, value.to(tl.int64), mask=mask)


@triton.jit
def _plan_number(plans, sample, which, value, mask):
    tl.store(plans + sample * _WORDS + which, value.to(tl.float64).to(tl.int64, bitcast=True), mask=mask)


@triton.jit
def limits_of(records, row, vocab_size):
    """What limits a row's draw: its temperature, top_k (0 = none), top_p and min_p, and whether top_k or min_p limits
    what top_p is a share of."""
    temperature = number(records, row, TEMPERATURE).to(tl.float32)
    top_k = tl.minimum(word(records, row, TOP_K), vocab_size).to(tl.int32)
    min_p = number(records, row, MIN_P)
    return temperature, top_k, number(records, row, TOP_P), min_p, (top_k > 0) | (min_p > 0.0)


@triton.jit
def peaks_of(peaks, sample, slot, num_blocks, num_samples, BLOCKS_PADDED: tl.constexpr):
    """The indices of a sample's summaries (of its changed copy, if there is one), which of them are blocks, and the
    blocks' peaks."""
    blocks = tl.arange(0, BLOCKS_PADDED)
    place = tl.where(slot >= 0, num_samples + slot, sample) * num_blocks + blocks
    known = blocks < num_blocks
    return place, known, tl.load(peaks + place, mask=known, other=-float("inf"))


@triton.jit
def least_weight_of(records, row):
    """The minimum weight of a kept token, relative to the peak."""
    return tl.minimum(tl.maximum(number(records, row, MIN_P), NO_WEIGHT), 1.0)


@triton.jit
def least_logit(masses, known, scaled_peaks, peak, bounded, top_p, min_p, vocab_size):
    """A logit below which no token is kept, and the mass of the whole row, or 0 if top_p is a share of less."""
    least = _bound(peak, min_p)
    total = min_p * 0.0
    if bounded == 0:
        total = tl.sum(over_peak(tl.load(masses, mask=known, other=0.0), scaled_peaks, peak), axis=0)
        # Everything lighter than this weighs less than what top_p leaves over, even if it were the whole vocabulary.
        least = tl.maximum(least, _bound(peak, (1.0 - top_p - _SLACK) * total / vocab_size))
    return least, total


@triton.jit
def _bound(peak, weight):
    """A logit below which none has this weight, or any weight at all; slightly lower than necessary, and below the
    peak."""
    depth = tl.log(tl.maximum(tl.minimum(weight, 1.0).to(tl.float32), 1e-37)) - 1e-3
    depth = tl.where(weight > 1e-37, depth, -_DEPTH)
    bound = peak + depth - tl.abs(peak) * 1e-6
    return tl.maximum(bound, -3.4e38)


@triton.jit
def first_guess(scaled_peaks, peak, least, total, bounded, num_blocks, top_k, top_p, min_p, SHIFT: tl.constexpr):
    """A logit above which all kept tokens lie, because enough blocks' peaks (or their mass) reach the limit; `least` if
    they do not. Also whether reading the blocks that reach it is cheap for one program."""
    weights = tl.exp(tl.minimum(scaled_peaks - peak, 0.0)).to(tl.float64)
    sizes = tl.where(bounded, 1.0, weights)
    target = tl.where(bounded, top_k.to(tl.float64), top_p * total)
    guess = peak_that_reaches(scaled_peaks, sizes, target, least, SHIFT)
    guess = tl.where((min_p > 0.0) & (top_k == 0), least, guess)
    num_listed = tl.sum((scaled_peaks >= guess).to(tl.int32), axis=0)
    return guess, num_listed <= tl.maximum(num_blocks // 4, 1)


@triton.jit(do_not_specialize=["num_samples"])
def choose_pivots_kernel(
    logits, stride, copies, slots, rows, records, peaks, masses, token_ids, plans, pivots,
    vocab_size, num_blocks, num_samples,
    BLOCKS_PADDED: tl.constexpr, PIVOTS: tl.constexpr, OWN: tl.constexpr, SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Begins each sample's plan (int64 [samples, PLAN_WORDS]) and writes its pivots (int64 [samples, PIVOTS]) in
    descending order. Several programs per sample: each finds the ranks of OWN of the sampled keys."""
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + sample)
    first = part == 0
    _plan(plans, sample, IS_NARROWED, part * 0, first)
    _plan(plans, sample, IS_READY, part * 0, first)
    if tl.load(token_ids + sample) < 0:
        return
    slot = slot_of(slots, sample, EDITED)
    place, known, block_peaks = peaks_of(peaks, sample, slot, num_blocks, num_samples, BLOCKS_PADDED)
    raw_peak = tl.max(block_peaks, axis=0)
    if (draws(records, row, raw_peak) & limited(records, row)) == 0:
        return
    temperature, top_k, top_p, min_p, bounded = limits_of(records, row, vocab_size)
    scaled_peaks = tl.div_rn(block_peaks, temperature)
    peak = tl.div_rn(raw_peak, temperature)
    least, total = least_logit(masses + place, known, scaled_peaks, peak, bounded, top_p, min_p, vocab_size)
    _, is_easy = first_guess(scaled_peaks, peak, least, total, bounded, num_blocks, top_k, top_p, min_p, SHIFT)
    if is_easy:
        return
    _plan(plans, sample, IS_NARROWED, part * 0 + 1, first)
    _plan_number(plans, sample, PEAK, peak, first)
    _plan_number(plans, sample, LEAST, least, first)
    _plan_number(plans, sample, TOTAL, total, first)

    least_weight = least_weight_of(records, row)
    SAMPLED: tl.constexpr = PIVOTS * SAMPLED_PER_PIVOT
    # At least four apart, so no token is sampled twice; positions beyond a small vocabulary are no keys.
    step = tl.maximum(vocab_size // (SAMPLED // _RUN), _RUN)
    own = part * OWN + tl.arange(0, OWN)
    keys, _ = keys_at(
        logits, stride, copies, sample, slot, vocab_size, temperature, peak, least, least_weight,
        own // _RUN * step + own % _RUN, own >= 0, SHIFT, EDITED,
    )  # fmt: skip
    rank = tl.zeros((OWN,), tl.int32)
    num_sampled = part * 0
    for begin in range(0, SAMPLED, _OTHERS):
        others = begin + tl.arange(0, _OTHERS)
        other_keys, _weights = keys_at(
            logits, stride, copies, sample, slot, vocab_size, temperature, peak, least, least_weight,
            others // _RUN * step + others % _RUN, others >= 0, SHIFT, EDITED,
        )  # fmt: skip
        rank += tl.sum((other_keys[None, :] > keys[:, None]).to(tl.int32), axis=1)
        num_sampled += tl.sum((other_keys > LOWEST_KEY).to(tl.int32), axis=0)
    pivots += sample * PIVOTS
    index = rank // SAMPLED_PER_PIVOT
    is_pivot = (rank % SAMPLED_PER_PIVOT == SAMPLED_PER_PIVOT - 1) & (keys > LOWEST_KEY) & (index < PIVOTS - 1)
    tl.store(pivots + index, keys, mask=is_pivot)
    # The last bin, and those without a sampled key, extend to the end.
    last = tl.arange(0, PIVOTS)
    is_end = (last >= num_sampled // SAMPLED_PER_PIVOT) | (last == PIVOTS - 1)
    tl.store(pivots + last, tl.zeros((PIVOTS,), tl.int64) + least_key(least, SHIFT), mask=is_end & first)


@triton.jit(do_not_specialize=["num_samples"])
def measure_splits_kernel(
    logits, stride, copies, slots, rows, records, peaks, plans, pivots, counts, sums,
    vocab_size, num_blocks, num_samples,
    PIVOTS: tl.constexpr, SPLIT_BLOCKS: tl.constexpr, SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Program (sample, split): how many of the split's keys are at or above each pivot, and their mass. counts int32
    and sums float64 [samples, splits, PIVOTS]."""
    sample, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if planned(plans, sample, IS_NARROWED) == 0:
        return
    row = tl.load(rows + sample)
    slot = slot_of(slots, sample, EDITED)
    temperature = number(records, row, TEMPERATURE).to(tl.float32)
    peak = planned_number(plans, sample, PEAK).to(tl.float32)
    least = planned_number(plans, sample, LEAST).to(tl.float32)
    least_weight = least_weight_of(records, row)
    blocks = split * SPLIT_BLOCKS + tl.arange(0, SPLIT_BLOCKS)
    place = tl.where(slot >= 0, num_samples + slot, sample) * num_blocks + blocks
    split_peak = tl.max(tl.load(peaks + place, mask=blocks < num_blocks, other=-float("inf")), axis=0)
    pivot = tl.arange(0, PIVOTS)
    bounds = tl.load(pivots + sample * PIVOTS + pivot)
    count = tl.zeros((_CHUNK, PIVOTS), tl.int32)
    mass = tl.zeros((_CHUNK, PIVOTS), tl.float64)
    begin = split * SPLIT_BLOCKS * BLOCK
    end = tl.where(tl.div_rn(split_peak, temperature) >= least, begin + SPLIT_BLOCKS * BLOCK, begin)
    for at in range(begin, end, _CHUNK):
        ids = at + tl.arange(0, _CHUNK)
        keys, weights = keys_at(
            logits, stride, copies, sample, slot, vocab_size, temperature, peak, least, least_weight, ids, ids >= 0,
            SHIFT, EDITED,
        )  # fmt: skip
        reaches = keys[:, None] >= bounds[None, :]
        count += reaches.to(tl.int32)
        mass += tl.where(reaches, weights[:, None], 0.0)
    out = (sample * tl.num_programs(1) + split) * PIVOTS + pivot
    tl.store(counts + out, tl.sum(count, axis=0))
    tl.store(sums + out, tl.sum(mass, axis=0))


@triton.jit
def collect_bins_kernel(
    logits, stride, copies, slots, rows, positions, records, plans, pivots, counts, sums, found,
    vocab_size, num_splits,
    PIVOTS: tl.constexpr, SPLITS_PADDED: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCKS: tl.constexpr,
    ROOM: tl.constexpr, SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Program (sample, SPLITS splits): completes the sample's plan, and writes the keys of its splits that are in the
    two bins. found int64 [samples, 2, ROOM]: keys of the bin where the kept tokens end, and of the drawn token's bin,
    unless it is the same."""
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if planned(plans, sample, IS_NARROWED) == 0:
        return
    row = tl.load(rows + sample)
    splits = tl.arange(0, SPLITS_PADDED)
    at = (sample * num_splits + splits[:, None]) * PIVOTS + tl.arange(0, PIVOTS)[None, :]
    there = splits[:, None] < num_splits
    upto = tl.load(counts + at, mask=there, other=0)
    pivots += sample * PIVOTS
    is_ready, end_bin, drawn_bin = _choose_bins(
        plans, sample, records, row, tl.load(positions + sample), pivots, tl.sum(upto, axis=0),
        tl.sum(tl.load(sums + at, mask=there, other=0.0), axis=0), vocab_size, part == 0, PIVOTS, ROOM, SHIFT,
    )  # fmt: skip
    if is_ready == 0:
        return
    slot = slot_of(slots, sample, EDITED)
    temperature = number(records, row, TEMPERATURE).to(tl.float32)
    peak = planned_number(plans, sample, PEAK).to(tl.float32)
    least = planned_number(plans, sample, LEAST).to(tl.float32)
    least_weight = least_weight_of(records, row)
    for which in range(tl.where(end_bin == drawn_bin, 1, 2)):
        chosen = tl.where(which == 0, end_bin, drawn_bin)
        in_split = _column(upto, chosen) - _column(upto, chosen - 1)
        low, high = _edges(pivots, chosen, peak, SHIFT)
        to = found + (sample * 2 + which) * ROOM
        for split in range(part * SPLITS, tl.minimum(part * SPLITS + SPLITS, num_splits)):
            written = tl.sum(tl.where(splits < split, in_split, 0), axis=0)
            is_in = tl.sum(tl.where(splits == split, in_split, 0), axis=0) > 0
            begin = split * SPLIT_BLOCKS * BLOCK
            for block in range(begin, tl.where(is_in, begin + SPLIT_BLOCKS * BLOCK, begin), 4 * BLOCK):
                ids = block + tl.arange(0, 4 * BLOCK)
                keys, _ = keys_at(
                    logits, stride, copies, sample, slot, vocab_size, temperature, peak, least, least_weight, ids,
                    ids < begin + SPLIT_BLOCKS * BLOCK, SHIFT, EDITED,
                )  # fmt: skip
                wanted = (keys >= low) & (keys < high)
                places = written + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
                tl.store(to + places, keys, mask=wanted)
                written += tl.sum(wanted.to(tl.int32), axis=0)


@triton.jit
def _choose_bins(
    plans, sample, records, row, position, pivots, count_at, mass_at, vocab_size, writes,
    PIVOTS: tl.constexpr, ROOM: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Completes the plan, and returns whether the bins suffice, and which they are. count_at, mass_at: of all keys at
    or above each pivot."""
    _, top_k, top_p, _, bounded = limits_of(records, row, vocab_size)
    chance = uniform(word(records, row, SEED), position)
    peak = planned_number(plans, sample, PEAK).to(tl.float32)
    pivot = tl.arange(0, PIVOTS)
    last = PIVOTS - 1
    by_count = (top_k > 0) & (_at(count_at, last) > top_k)
    all_mass = _at(mass_at, last)
    share = top_p * tl.where(bounded, all_mass, planned_number(plans, sample, TOTAL))
    end_bin = first_of(pivot, mass_at >= share, last)
    # The kept tokens weigh at least the share, and without the last of them less than it.
    above_end = tl.load(pivots + end_bin - 1, mask=end_bin > 0, other=least_key(peak, SHIFT))
    heaviest = tl.exp(logit_of(above_end, SHIFT) - peak).to(tl.float64)
    kept = tl.where(top_p < 1.0, share, all_mass)
    most_kept = tl.where(top_p < 1.0, tl.minimum(_at(mass_at, end_bin), share + heaviest), all_mass)
    drawn_bin = first_of(pivot, mass_at >= chance * kept * (1.0 - _ROUNDING), last)
    is_certain = drawn_bin == first_of(pivot, mass_at >= chance * most_kept * (1.0 + _ROUNDING), last)
    # What top_k keeps is only searched for in the first bin, which then contains everything that follows too.
    is_certain = tl.where(by_count, _at(count_at, 0) >= top_k, is_certain)
    drawn_bin = tl.where(by_count, 0, drawn_bin)
    end_bin = tl.where(by_count, 0, tl.where(top_p < 1.0, end_bin, drawn_bin))
    num_end = _at(count_at, end_bin) - _at(count_at, end_bin - 1)
    num_drawn = _at(count_at, drawn_bin) - _at(count_at, drawn_bin - 1)
    is_ready = is_certain & (num_end <= ROOM) & (num_drawn <= ROOM)
    _plan(plans, sample, IS_READY, is_ready, writes)
    _plan(plans, sample, BY_COUNT, by_count, writes)
    _plan_number(plans, sample, ALL_MASS, all_mass, writes)
    _plan_bin(plans, sample, END_BIN, pivots, end_bin, num_end, mass_at, peak, writes, SHIFT)
    _plan_bin(plans, sample, DRAWN_BIN, pivots, drawn_bin, num_drawn, mass_at, peak, writes, SHIFT)
    return is_ready, end_bin, drawn_bin


@triton.jit
def _plan_bin(
    plans, sample, first_word, pivots, which, num_inside, mass_at, peak, writes, SHIFT: tl.constexpr
):  # fmt: skip
    low, high = _edges(pivots, which, peak, SHIFT)
    _plan(plans, sample, first_word + LOW, low, writes)
    _plan(plans, sample, first_word + HIGH, high, writes)
    _plan(plans, sample, first_word + NUM_INSIDE, num_inside, writes)
    _plan_number(plans, sample, first_word + MASS_BEYOND, _at(mass_at, which - 1), writes)


@triton.jit
def _edges(pivots, which, peak, SHIFT: tl.constexpr):
    """The lowest key of a bin, and its upper bound."""
    above_all = least_key(peak, SHIFT) + (1 << SHIFT)
    return tl.load(pivots + which), tl.load(pivots + which - 1, mask=which > 0, other=above_all)


@triton.jit
def _at(values, which):
    """One element of a tile; 0 before the first."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == which, values, values * 0), axis=0)


@triton.jit
def _column(values, which):
    return tl.sum(tl.where(tl.arange(0, values.shape[1])[None, :] == which, values, 0), axis=1)
