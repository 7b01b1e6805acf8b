"""One uniform number per token, from a counter and not from a generator's state.

For: the samplers, and whoever needs a hash of 64-bit numbers. Does not know: logits. Invariant: the number for (seed,
position) is the same in every batch, process and restart, because nothing is remembered between calls.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: UInt64Array, positions: UInt64Array) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for pairs of seed and position; arrays of equal shape.

    The position is mixed into the mixed seed, so that neighbouring seeds and positions have unrelated numbers.
    """
    bits = splitmix64(splitmix64(seeds) ^ (positions * _GOLDEN))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def splitmix64(values: UInt64Array) -> UInt64Array:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit numbers."""
    mixed = values + _GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: UInt64Array = mixed ^ (mixed >> np.uint64(31))
    return result
