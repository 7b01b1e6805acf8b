"""Where every random choice of a sample comes from, and what keeps the exam's values out of the training text.

Names, words, numbers, wordings and whole questions belong to one of two sides, by a checksum of their text: about one
in eight to the exam, the rest to training. Does not know: which skills exist. Invariant: a source of one side never
gives a value of the other side, unless a pool has none of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import Literal, TypeVar

Side = Literal["training", "exam"]
T = TypeVar("T")
_EXAM_SHARE = 8
"""One in so many texts is the exam's."""


def side_of(text: str) -> Side:
    """Case, outer spaces and punctuation do not count."""
    plain = text.casefold().strip(" .,!?\"'")
    return "exam" if zlib.crc32(plain.encode()) % _EXAM_SHARE == 0 else "training"


@lru_cache(maxsize=1024)
def _of_side(pool: tuple[str, ...], side: Side) -> tuple[str, ...]:
    return tuple(text for text in pool if side_of(text) == side)


class Source(Random):
    """`Random` with a side."""

    def __init__(self, seed: str, side: Side = "training") -> None:
        super().__init__(seed)
        self.side: Side = side

    def value(self, pool: Sequence[str]) -> str:
        """One of the pool, which is text that answers repeat."""
        return self.choice(_of_side(tuple(pool), self.side) or pool)

    def wording(self, frames: Sequence[str]) -> str:
        """One of the ways to ask."""
        return self.value(frames)

    def until(self, draw: Callable[[], T]) -> T:
        """The first of what `draw` gives whose text is on this side."""
        while side_of(str(drawn := draw())) != self.side:
            pass
        return drawn

    def number(self, lowest: int, highest: int) -> int:
        """For numbers that answers repeat; at least 32 to choose from, or sides do not count."""
        if highest - lowest < 32:
            return self.randint(lowest, highest)
        return self.until(lambda: self.randint(lowest, highest))
