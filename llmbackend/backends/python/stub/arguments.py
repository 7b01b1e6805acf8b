"""The argument conversions of the C++ signatures of Triton's pb_utils: text may be str or UTF-8 bytes, because a model
often takes a name from a BYTES tensor."""

from __future__ import annotations

import operator
from typing import SupportsIndex


def text(value: str | bytes, name: str) -> str:
    """Raises TypeError for another type, ValueError for bytes that are not UTF-8."""
    if isinstance(value, str):
        return str(value)
    if not isinstance(value, (bytes, bytearray)):
        raise TypeError(f"{name} must be str or bytes, got {type(value).__name__}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be UTF-8, got {bytes(value)[:64]!r}: {error.reason}") from None


def integer(value: SupportsIndex, name: str, least: int, most: int) -> int:
    """Raises TypeError for another type, and out of range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None
    if not least <= number <= most:
        raise TypeError(f"{name} must be an int from {least} to {most}, got {number}")
    return number
