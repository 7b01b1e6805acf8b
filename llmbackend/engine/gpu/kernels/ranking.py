"""Ranks tokens by likelihood without sorting; among equal logits, the lower token id comes first.

Used by ranked_sampling.py. Invariants: rank keys are distinct integers that increase with likelihood; every search ends
at an existing key; sums have a fixed order.

A search narrows an interval of keys around its target by passes over the whole row, until it contains at most
CANDIDATES keys; those are collected, and the search ends among them. Only blocks that can contain such a key are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling import BLOCK, load_logits

CANDIDATES = tl.constexpr(2048)
GATHERED = tl.constexpr(16)
"""Blocks read together."""

LOWEST_KEY = tl.constexpr(-(2**63))


@triton.jit
def rank_key(x, ids, vocab_size, SHIFT: tl.constexpr):
    """int64; x float32 and not NaN, ids below 2 ** SHIFT."""
    return least_key(x, SHIFT) | (-ids + vocab_size - 1).to(tl.int64)


@triton.jit
def least_key(x, SHIFT: tl.constexpr):
    """The bound between the keys of x and those of smaller logits: at most the former, above the latter."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) << SHIFT


@triton.jit
def logit_of(key, SHIFT: tl.constexpr):
    ordered = (key >> SHIFT).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key, vocab_size, SHIFT: tl.constexpr):
    return vocab_size - 1 - (key & ((1 << SHIFT) - 1)).to(tl.int32)


@triton.jit
def middle(low, high, SHIFT: tl.constexpr):
    """A key above `low` and below `high`, which differ by more than one: halfway between their logits if possible,
    because logits are distributed more evenly as numbers than as bit patterns."""
    half = least_key(logit_of(low, SHIFT) * 0.5 + logit_of(high, SHIFT) * 0.5, SHIFT)
    border = (high >> SHIFT) << SHIFT
    between = (low >> 1) + (high >> 1) + (low & high & 1)
    best = tl.where((half > low) & (half < high), half, tl.where((border > low) & (border < high), border, between))
    return best


@triton.jit
def search_tile(keys, sizes, target, before, low, high, SHIFT: tl.constexpr):
    """The largest key in [low, high) at which `before` plus the sizes of all keys from it on reaches the target; the
    smallest key if, due to rounding, none does."""
    inside = tl.sum(((keys >= low) & (keys < high)).to(tl.int32), axis=0)
    while inside > 1:
        pivot = middle(low, high, SHIFT)
        reached = before + tl.sum(tl.where(keys >= pivot, sizes, 0.0), axis=0)
        above = tl.sum(((keys >= pivot) & (keys < high)).to(tl.int32), axis=0)
        up = (above > 0) & ((reached >= target) | (above == inside))
        low = tl.where(up, pivot, low)
        high = tl.where(up, high, pivot)
        inside = tl.where(up, above, inside - above)
    return tl.max(tl.where((keys >= low) & (keys < high), keys, LOWEST_KEY), axis=0)


@triton.jit
def list_blocks(scaled_peaks, least, listed):
    """Writes the numbers of the blocks whose peaks reach `least`; returns how many."""
    blocks = tl.arange(0, scaled_peaks.shape[0])
    wanted = scaled_peaks >= least
    places = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.debug_barrier()
    tl.store(listed + places, blocks, mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), axis=0)


@triton.jit
def keys_at(
    logits, stride, copies, sample, slot, vocab_size, temperature, peak, least, least_weight, ids, mask,
    SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Keys and weights (float64, relative to the peak) of the ids where mask is true. Keys of logits below `least`, of
    weights below least_weight, and of masked ids are LOWEST_KEY, with weight 0."""
    there = mask & (ids < vocab_size)
    x = tl.div_rn(load_logits(logits, stride, copies, sample, slot, vocab_size, ids, there, EDITED), temperature)
    weights = tl.exp(tl.minimum(x - peak, 0.0)).to(tl.float64)
    there = there & (x >= least) & (weights >= least_weight)
    return tl.where(there, rank_key(x, ids, vocab_size, SHIFT), LOWEST_KEY), tl.where(there, weights, 0.0)


@triton.jit
def gather_keys(
    logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed, begin,
    SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Keys and weights, as in keys_at, of the listed blocks from `begin` on, as flat tiles."""
    which = begin + tl.arange(0, GATHERED)
    block = tl.load(listed + which, mask=which < num_listed, other=0)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    keys, weights = keys_at(
        logits, stride, copies, sample, slot, vocab_size, temperature, peak, float("-inf"), least_weight, ids,
        (which < num_listed)[:, None], SHIFT, EDITED,
    )  # fmt: skip
    size: tl.constexpr = GATHERED * BLOCK
    return tl.reshape(keys, (size,)), tl.reshape(weights, (size,))


@triton.jit
def measure(
    logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed, low,
    SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """How many keys are at or above `low`, and their mass."""
    size: tl.constexpr = GATHERED * BLOCK
    counts = tl.zeros((size,), tl.int32)
    masses = tl.zeros((size,), tl.float64)
    begin = num_listed * 0
    while begin < num_listed:
        keys, weights = gather_keys(
            logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed,
            begin, SHIFT, EDITED,
        )  # fmt: skip
        counts += ((keys >= low) & (keys > LOWEST_KEY)).to(tl.int32)
        masses += tl.where(keys >= low, weights, 0.0)
        begin += GATHERED
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def collect(
    logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed, low, high,
    found, room, SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Writes the first `room` keys in [low, high); returns how many keys there are."""
    count = num_listed * 0
    begin = num_listed * 0
    tl.debug_barrier()
    while begin < num_listed:
        keys, _ = gather_keys(
            logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed,
            begin, SHIFT, EDITED,
        )  # fmt: skip
        wanted = (keys >= low) & (keys < high) & (keys > LOWEST_KEY)
        places = count + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        tl.store(found + places, keys, mask=wanted & (places < room))
        count += tl.sum(wanted.to(tl.int32), axis=0)
        begin += GATHERED
    tl.debug_barrier()
    return count


@triton.jit
def search(
    logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed,
    target, by_count, low, num_low, high, found,
    SHIFT: tl.constexpr, EDITED: tl.constexpr,
):  # fmt: skip
    """Narrows the interval around the largest key at which the count (or mass) of the keys from it on reaches the
    target, until `found` contains all keys of the interval. num_low: keys at or above `low`; none are at or above
    `high`.

    Returns the interval, how many keys are in it, and the count and mass of those above it.
    """
    inside = num_low
    num_beyond = num_low * 0
    mass_beyond = target * 0.0
    while inside > CANDIDATES:
        pivot = middle(low, high, SHIFT)
        count, mass = measure(
            logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed,
            pivot, SHIFT, EDITED,
        )  # fmt: skip
        reached = tl.where(by_count, count.to(tl.float64), mass)
        up = (count > num_beyond) & ((reached >= target) | (count - num_beyond == inside))
        inside = tl.where(up, count - num_beyond, inside - (count - num_beyond))
        low = tl.where(up, pivot, low)
        high = tl.where(up, high, pivot)
        num_beyond = tl.where(up, num_beyond, count)
        mass_beyond = tl.where(up, mass_beyond, mass)
    collect(
        logits, stride, copies, sample, slot, vocab_size, temperature, peak, least_weight, listed, num_listed, low,
        high, found, CANDIDATES, SHIFT, EDITED,
    )  # fmt: skip
    return low, high, inside, num_beyond, mass_beyond


@triton.jit
def peak_that_reaches(scaled_peaks, sizes, target, least, SHIFT: tl.constexpr):
    """The logit down to which the blocks' peaks have sizes that reach the target, so that all logits down to it do too;
    `least` if that is higher."""
    size: tl.constexpr = scaled_peaks.shape[0]
    keys = rank_key(scaled_peaks, tl.arange(0, size), size, SHIFT)
    there = scaled_peaks >= least
    keys = tl.where(there, keys, LOWEST_KEY)
    low = least_key(least, SHIFT)
    high = tl.max(keys, axis=0) + 1
    key = search_tile(keys, tl.where(there, sizes, 0.0), target, target * 0.0, low, high, SHIFT)
    enough = tl.sum(tl.where(there, sizes, 0.0), axis=0) >= target
    return tl.where(enough, logit_of(key, SHIFT), least)
