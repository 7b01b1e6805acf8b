"""Text for a terminal: bars of block characters, and untrusted text, in which newline and tab are the only control
characters that pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_SHOWN: Final = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},  # pictures of control characters
    0x0D: None,  # next to a newline it means nothing
    0x7F: "␡",
    **dict.fromkeys(range(0x80, 0xA0), "�"),  # C1 control characters, which some terminals treat as escape sequences
    **{code: f"<U+{code:04X}>" for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))},
    0x2028: "\n",
    0x2029: "\n",
    **dict.fromkeys(range(0xD800, 0xE000), "�"),  # halves of surrogate pairs, which cannot be written
}


def harmless(text: str) -> str:
    """`text` in a form that can safely be written to a terminal."""
    return text.translate(_SHOWN)


def harmless_line(text: str) -> str:
    """The harmless text on one line."""
    return " ".join(harmless(text).split())


_PARTS: Final = "▏▎▍▌▋▊▉"
_HEIGHTS: Final = "▁▂▃▄▅▆▇█"


def bar(share: float, width: int, rest: str = "░") -> str:
    """A bar that starts at the left, padded with `rest`. share: 0 to 1."""
    full, part = divmod(round(min(max(share, 0.0), 1.0) * width * 8), 8)
    return ("█" * full + (_PARTS[part - 1] if part else "")).ljust(width, rest)


def sparkline(values: Sequence[float]) -> str:
    """One character per value, with a height proportional to the largest value."""
    largest = max(values, default=0.0)
    if largest <= 0:
        return _HEIGHTS[0] * len(values)
    return "".join(_HEIGHTS[min(int(max(value, 0.0) / largest * 8), 7)] for value in values)
