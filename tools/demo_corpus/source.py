"""The source of all random choices of a sample, which keeps the exam's values out of the training text.

Names, words, numbers, wordings and whole questions belong to one of two sides, according to a checksum of their text:
about one in eight to the exam, the rest to training. A pattern stands for many wordings: `(say|write)` means one of the
two, `[please ]` means optional. Independent of which skills exist. Invariant: a source for one side never returns a
value of the other side, unless a pool has none of its own.
"""

from __future__ import annotations

import itertools
import re
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


@lru_cache(maxsize=8192)
def _of_side(pool: tuple[str, ...], side: Side) -> tuple[str, ...]:
    return tuple(text for text in pool if side_of(text) == side)


_CHOICE = re.compile(r"\(([^()]*)\)|\[([^\[\]]*)\]")


@lru_cache(maxsize=4096)
def wordings_of(pattern: str) -> tuple[str, ...]:
    """All that a pattern stands for; alternatives are not nested."""
    parts: list[tuple[str, ...]] = []
    end = 0
    for choice in _CHOICE.finditer(pattern):
        parts.append((pattern[end : choice.start()],))
        one, optional = choice.groups()
        parts.append(tuple(one.split("|")) if one is not None else (*optional.split("|"), ""))
        end = choice.end()
    parts.append((pattern[end:],))
    return tuple("".join(chosen) for chosen in itertools.product(*parts))


@lru_cache(maxsize=256)
def _patterns_of_side(patterns: tuple[str, ...], side: Side) -> tuple[str, ...]:
    return tuple(pattern for pattern in patterns if _of_side(wordings_of(pattern), side))


class Source(Random):
    """`Random` with a side."""

    def __init__(self, seed: str, side: Side = "training") -> None:
        super().__init__(seed)
        self.side: Side = side

    def value(self, pool: Sequence[str]) -> str:
        """One of the pool, which is text that answers repeat."""
        return self.choice(_of_side(tuple(pool), self.side) or pool)

    def wording(self, patterns: Sequence[str]) -> str:
        """One of the ways to ask: any pattern, then any of its wordings."""
        every = tuple(patterns)
        return self.value(wordings_of(self.choice(_patterns_of_side(every, self.side) or every)))

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
