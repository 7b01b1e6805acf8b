"""Bars of block characters, an eighth of a character fine.

For: `llmbackend top` and `bench`. Does not know: what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_PARTS: Final = "▏▎▍▌▋▊▉"
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"


def bar(share: float, width: int, rest: str = "░") -> str:
    """A bar from the left, filled up with `rest`. share: 0 to 1."""
    full, part = divmod(round(min(max(share, 0.0), 1.0) * width * 8), 8)
    return ("█" * full + (_PARTS[part - 1] if part else "")).ljust(width, rest)


def sparkline(values: Sequence[float]) -> str:
    """One character for each value, as high as its share of the largest."""
    largest = max(values, default=0.0)
    if largest <= 0:
        return _HEIGHTS[0] * len(values)
    return "".join(_HEIGHTS[min(int(max(value, 0.0) / largest * 8), 7)] for value in values)
