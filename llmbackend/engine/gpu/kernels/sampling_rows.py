"""What each row asks of sampling, as kernels read it: one record of 64-bit words per row, on the device.

For: the sampling kernels, and device_sampler.py, which writes the records. Does not know: requests. Invariant: the
numpy type and the words' numbers below say the same.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl

RECORD = np.dtype(
    [
        ("temperature", np.float64),  # a float32's value; 0: greedy
        ("seed", np.uint64),
        ("top_k", np.int64),  # 0: no limit
        ("top_p", np.float64),  # 1: no limit
        ("min_p", np.float64),  # 0: no limit
        ("num_logprobs", np.int64),  # -1: none wanted
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
    """float64 in [0, 1) for a seed's 64 bits and a position: the twin of random_numbers.uniform."""
    mixed = position.to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = _splitmix64(_splitmix64(seed.to(tl.uint64, bitcast=True)) ^ mixed)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _splitmix64(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
