"""The conversions of arguments that the C++ signatures of Triton's pb_utils make.

For: every class and function of pb_utils. Does not know: what an argument is for. Invariants: text is str or bytes in
UTF-8, because a model often takes a name from a BYTES tensor; results are of plain types, which a message to the host
may hold; the error names the argument. Source: pybind11's casters for std::string and the integer types.
"""

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
