"""Whether a grammar that compiles can be followed: the beginnings of a few of its texts, written byte by byte.

For: compilation.py. Does not know: constraints. Invariant: the same grammar gives the same answer. What it does not
find: a place beyond the beginnings that it tries, and a mask that is too much work for the model's vocabulary alone.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import numpy as np

from .bounds import PROBE_MASKS, PROBES

if TYPE_CHECKING:
    from llguidance import LLMatcher

_NUM_BYTES: Final = 256
_CLOSING: Final = frozenset(b'"}],:>)\n')
"""They are written often, so that a text does not stay in its first string."""


def why_not_followed(matcher: LLMatcher) -> str:
    """The library's reason; "" when nothing was found. matcher: of bytes, at its beginning"""
    for probe in range(PROBES):
        if error := _why_not_followed(matcher.deep_copy(), random.Random(probe)):
            return error
    return ""


def _why_not_followed(matcher: LLMatcher, rng: random.Random) -> str:
    for _ in range(PROBE_MASKS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return str(matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8)[: _NUM_BYTES // 8], bitorder="little"))
        if not allowed.size:
            return "" if matcher.is_accepting() or any(mask) else "no text follows its beginning"
        matcher.consume_token(_choice(allowed.tolist(), rng))
        if forced := matcher.compute_ff_tokens():
            matcher.consume_tokens(forced)
        if matcher.is_error():
            return str(matcher.get_error())
    return ""


def _choice(allowed: list[int], rng: random.Random) -> int:
    closing = [byte for byte in allowed if byte in _CLOSING]
    return rng.choice(closing if closing and rng.random() < 0.5 else allowed)
