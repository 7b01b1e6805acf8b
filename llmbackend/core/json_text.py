"""Counts characters and nesting in JSON text before it is parsed. Milliseconds per megabyte, mostly without the GIL."""

from __future__ import annotations

import numpy as np


def count_outside_strings(text: bytes, characters: bytes) -> int:
    """Counts occurrences of `characters` (ASCII, no quote or backslash) outside strings."""
    data = np.frombuffer(text.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = np.cumsum(data == ord('"'), dtype=np.uint8) & 1 == 0  # wraps around at 256, which is even
    is_counted = np.zeros(len(data), np.bool_)
    for character in characters:
        is_counted |= data == character
    return int(np.count_nonzero(is_counted & is_outside))


def json_depth(text: str | bytes) -> int:
    """The deepest nesting of brackets outside strings. A Python loop: for short texts."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    depth = deepest = 0
    in_string = escaped = False
    for byte in data:
        if in_string:
            in_string = escaped or byte != 0x22
            escaped = not escaped and byte == 0x5C
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest
