"""Prompt lookup: what a text probably goes on with, by what followed when it last said the same.

For: runners that make drafts themselves, and tests of those that do so on a device: this is the definition. Does not
know: rows, steps, how often a lookup pays. Invariant: a guess is a function of the text and the lengths alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .config import SpeculativeConfig
from .step import Int32Array


class LookupLengths(NamedTuple):
    """Tokens of the shortest and of the longest ending of a text that is searched for in it."""

    shortest: int
    longest: int

    @classmethod
    def of(cls, config: SpeculativeConfig) -> LookupLengths:
        return cls(config.lookup_min, config.lookup_max)


def look_up(text: Int32Array, count: int, lengths: LookupLengths) -> Int32Array:
    """The next `count` tokens of a text, int32 [n], n ≥ 1: those behind the last earlier occurrence of its longest
    ending, again and again where the text ends before them; its last token where no ending has occurred."""
    ends = np.arange(len(text) - 1)
    matched, is_equal = np.zeros(len(ends), np.int32), np.ones(len(ends), np.bool_)
    for back in range(min(lengths.longest, len(text) - 1)):
        is_equal = is_equal & (ends >= back) & (text[ends - back] == text[-1 - back])
        matched += is_equal
    source = len(text) - 1
    if len(ends) and (most := int(matched.max())) >= lengths.shortest:
        source = int(np.flatnonzero(matched == most)[-1]) + 1
    return np.resize(text[source:], count)
