"""The wire format of protocol buffers, to take large tensors out of a message without parsing it.

For: messages.py. Does not know: which messages there are, besides the repeated fields of typed tensor contents.
Invariant: Python's work is in proportion to the number of fields, which callers bound, and numpy's to their bytes.
Source: the encoding guide of protocol buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

_VARINT, _FIXED_64, LENGTH, _FIXED_32 = 0, 1, 2, 5
_WIDTHS: Final = {_FIXED_64: 8, _FIXED_32: 4}
_MAX_VARINT_BYTES: Final = 10
_CHUNK_BYTES: Final = 1 << 20
"""Of packed varints that are decoded at once: numpy's temporary arrays take 25 times as much."""


class Field(NamedTuple):
    """A field of a message. start, end: where it is, with its tag; value: where what is behind its tag and length
    begins."""

    number: int
    kind: int
    start: int
    value: int
    end: int


def fields(data: memoryview) -> Iterator[Field]:
    """The fields of a message, in order. Raises DecodeError for what is no message."""
    offset = 0
    while offset < len(data):
        start = offset
        tag, offset = read_varint(data, offset)
        number, kind = tag >> 3, tag & 7
        if kind == LENGTH:
            length, offset = read_varint(data, offset)
            value, offset = offset, offset + length
        elif kind == _VARINT:
            value, (_, offset) = offset, read_varint(data, offset)
        elif kind in _WIDTHS:
            value, offset = offset, offset + _WIDTHS[kind]
        else:
            raise DecodeError(f"field of wire type {kind}")
        if offset > len(data):
            raise DecodeError("cut short")
        yield Field(number, kind, start, value, offset)


def read_varint(data: memoryview, offset: int) -> tuple[int, int]:
    """The number at `offset`, and the offset behind it. Raises DecodeError."""
    if offset < len(data) and (byte := data[offset]) < 0x80:  # nearly always
        return byte, offset + 1
    value = 0
    for index, byte in enumerate(data[offset : offset + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, offset + index + 1
    raise DecodeError("no end of a number")


def write_length_field(number: int, value: bytes | memoryview) -> bytes:
    """A field of wire type LENGTH: an embedded message, or bytes."""
    return _varint(number << 3 | LENGTH) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def packed_varints(data: memoryview, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The numbers of a packed field of varints, each cut to the width of `dtype`; to bool: whether it is not 0.

    Raises DecodeError for a number without an end or of more than 10 bytes.
    """
    raw = np.frombuffer(data, np.uint8)
    if raw.size and raw[-1] >= 0x80:
        raise DecodeError("no end of a number")
    # Most are of one byte: these are the numbers themselves.
    if not (raw >= 0x80).any():
        return raw.astype(dtype)
    numbers = np.empty(np.count_nonzero(raw < 0x80), dtype)
    done = 0
    while raw.size:
        ends = np.flatnonzero(raw[: _CHUNK_BYTES + _MAX_VARINT_BYTES] < 0x80) + 1
        if not ends.size:
            raise DecodeError("a number is too long")
        numbers[done : done + ends.size] = _varints(raw, ends).astype(dtype)
        done, raw = done + ends.size, raw[ends[-1] :]
    return numbers


def _varints(raw: npt.NDArray[np.uint8], ends: npt.NDArray[np.intp]) -> npt.NDArray[np.uint64]:
    """The numbers that end before `ends`; the first begins at 0."""
    starts = np.concatenate(([0], ends[:-1]))
    widths = ends - starts
    if widths.max() > _MAX_VARINT_BYTES:
        raise DecodeError("a number is too long")
    values = np.zeros(ends.size, np.uint64)
    for place in range(widths.max()):
        there = np.flatnonzero(widths > place)
        values[there] |= (raw[starts[there] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return values
