"""Logprobs of the model's own distribution: the chosen token's, its rank, and the most likely tokens.

For: device_sampler.py. Does not know: how tokens were chosen. Invariants: logits are read as the model gave them,
without edits or temperature; the most likely come as their rank keys, in no order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .ranking import (
    CANDIDATES,
    LOWEST_KEY,
    collect,
    least_key,
    list_blocks,
    measure,
    peak_of_rank,
    search,
    search_tile,
)
from .sampling import over_peak
from .sampling_rows import NUM_LOGPROBS, WORDS

_ANY_WEIGHT = tl.constexpr(-1.0)
_LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit(do_not_specialize=["top_width"])
def logprobs_kernel(
    logits, stride, rows, records, peaks, unit_masses, listed, found, token_ids,
    asked, own_logprobs, ranks, norms, top_keys, top_width, vocab_size, num_blocks,
    BLOCKS_PADDED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """asked int32: how many of the most likely a sample's row wants, -1: no logprobs. norms float64: of the
    distribution. top_keys int64 [samples, top_width], LOWEST_KEY where there is nothing; none, if the width is 0."""
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

    # Whoever is above the chosen token is above all keys of its logit.
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
    guess = peak_of_rank(block_peaks, count, _LEAST, SHIFT)
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
        top_keys + sample * top_width, count, SHIFT, False,
    )  # fmt: skip
