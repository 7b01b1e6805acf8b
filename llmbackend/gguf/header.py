"""Reads the header of a GGUF file: fields by name, and each tensor's type, shape and offset.

Invariants: a number from the file is checked against the file's size and the limits here before it is used, so reading
costs no more than a header of the largest allowed size; returned tensors lie inside the file and do not overlap.
Source: the GGUF format, versions 2 and 3: magic, version, counts of tensors and fields; then name, type and value of
each field; then name, shape, type and offset of each tensor; then the data, aligned. All numbers are little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from .errors import GgufError, short
from .tensor_types import TYPES, TensorType, name_of

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER_BYTES: Final = 1 << 28
MAX_FIELDS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 17
MAX_NAME_BYTES: Final = 1 << 10
MAX_STRINGS: Final = 1 << 22
"""Per list. Larger than any vocabulary and its merges."""
MAX_DIMENSIONS: Final = 4
MAX_ALIGNMENT: Final = 1 << 20
DEFAULT_ALIGNMENT: Final = 32
ALIGNMENT: Final = "general.alignment"

_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Strings:
    """A list of strings, decoded on demand."""

    raw: bytes
    count: int

    def decoded(self, field: str) -> list[str]:
        """Raises GgufError naming the field."""
        found, place = [], 0
        for index in range(self.count):
            (size,) = _LENGTH.unpack_from(self.raw, place)
            place += 8 + size
            try:
                found.append(self.raw[place - size : place].decode())
            except UnicodeDecodeError:
                raise GgufError(f"its field '{field}' has an entry {index} that is not UTF-8") from None
        return found


@dataclass(frozen=True, slots=True)
class TensorInfo:
    file: Path
    type: TensorType
    shape: tuple[int, ...]
    """In torch's order: rows first."""
    offset: int
    """Of the data, from the start of the file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    fields: Mapping[str, Any]
    """Numbers, booleans, strings, `Strings`, and numpy arrays of numbers."""
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Raises GgufError naming field or tensor, or OSError."""
    with path.open("rb") as file:
        size_bytes = path.stat().st_size
        if size_bytes < 24 or file.read(4) != MAGIC:
            raise GgufError(f"{path.name} is not a GGUF file: it does not begin with '{MAGIC.decode()}' and a header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(path, data).header()
            except GgufError as error:
                raise GgufError(f"{path.name}: {error}") from None


class _Reader:
    """A cursor in a file's header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._place = len(MAGIC)

    def header(self) -> Header:
        version = self._number("I", "its version")
        if version not in VERSIONS:
            byteswapped = " (big-endian files are not supported)" if version & 0xFFFF == 0 else ""
            raise GgufError(f"its version is {version}, expected {' or '.join(map(str, VERSIONS))}{byteswapped}")
        num_tensors = self._count("its number of tensors", MAX_TENSORS)
        num_fields = self._count("its number of fields", MAX_FIELDS)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._name("the name of a field")
            if name in fields:
                raise GgufError(f"its field '{short(name)}' appears twice")
            fields[name] = self._value(f"its field '{short(name)}'", self._number("I", f"the type of '{short(name)}'"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        start = _aligned(self._place, alignment := _alignment(fields))
        return Header(fields, self._tensors(entries, start, alignment))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("the name of a tensor")
        what = f"its tensor '{short(name)}'"
        num_dimensions = self._number("I", what)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise GgufError(f"{what} has {num_dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number("Q", what) for _ in range(num_dimensions))
        return name, shape[::-1], self._number("I", what), self._number("Q", what)

    def _tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, number, offset in entries:
            if name in tensors:
                raise GgufError(f"its tensor '{short(name)}' appears twice")
            what = f"its tensor '{short(name)}'"
            if number not in TYPES:
                read = ", ".join(each.name for each in TYPES.values())
                raise GgufError(f"{what} is of type {name_of(number)}, expected one of: {read}")
            size_bytes = _size_bytes(what, TYPES[number], shape)
            if offset % alignment:
                raise GgufError(f"{what} begins at {offset}, expected a multiple of the alignment, {alignment}")
            if start + offset + size_bytes > len(self._data):
                raise GgufError(
                    f"{what} ends at byte {start + offset + size_bytes}, but the file has {len(self._data)}: it is "
                    "truncated"
                )
            tensors[name] = TensorInfo(self._path, TYPES[number], shape, start + offset, size_bytes)
        _check_overlaps(tensors)
        return tensors

    def _value(self, what: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise GgufError(f"{what} is of the unknown type {kind}")
        return self._number(_SCALARS[kind], what)

    def _array(self, what: str) -> Any:
        kind, count = self._number("I", what), self._number("Q", what)
        if kind == _STRING:
            return self._strings(what, count)
        if kind not in _SCALARS:
            expected = "numbers or strings"
            raise GgufError(f"{what} is a list of {'lists' if kind == _ARRAY else f'type {kind}'}, expected {expected}")
        dtype = np.dtype(f"<{_NUMPY[_SCALARS[kind]]}")
        raw = self._bytes(what, count * dtype.itemsize)
        return np.frombuffer(raw, dtype=dtype)

    def _strings(self, what: str, count: int) -> Strings:
        if count > MAX_STRINGS:
            raise GgufError(f"{what} is a list of {count} strings, expected at most {MAX_STRINGS}")
        begin, place, end, data, unpack = self._place, self._place, self._end, self._data, _LENGTH.unpack_from
        for _ in range(count):
            if place + 8 > end:
                raise _truncated(what)
            place += 8 + unpack(data, place)[0]
        if place > end:
            raise _truncated(what)
        self._place = place
        return Strings(data[begin:place], count)

    def _name(self, what: str) -> str:
        name = self._string(what, MAX_NAME_BYTES)
        if not name:
            raise GgufError(f"{what} is empty")
        return name

    def _string(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        size = self._number("Q", what)
        if size > most:
            raise GgufError(f"{what} has {size} bytes, expected at most {most}")
        try:
            return self._bytes(what, size).decode()
        except UnicodeDecodeError:
            raise GgufError(f"{what} is not UTF-8") from None

    def _count(self, what: str, most: int) -> int:
        count = int(self._number("Q", what))
        if count > most:
            raise GgufError(f"{what} is {count}, expected at most {most}")
        return count

    def _number(self, kind: str, what: str) -> Any:
        raw = self._bytes(what, struct.calcsize(f"<{kind}"))
        return struct.unpack(f"<{kind}", raw)[0]

    def _bytes(self, what: str, size: int) -> bytes:
        if size > self._end - self._place:
            raise _truncated(what)
        self._place += size
        return self._data[self._place - size : self._place]


_LENGTH: Final = struct.Struct("<Q")
_NUMPY: Final = {
    "B": "u1", "b": "i1", "H": "u2", "h": "i2", "I": "u4", "i": "i4", "f": "f4", "?": "?", "Q": "u8", "q": "i8",
    "d": "f8",
}  # fmt: skip


def _truncated(what: str) -> GgufError:
    return GgufError(f"{what} goes beyond the end of the file or of the largest header ({MAX_HEADER_BYTES} bytes)")


def _alignment(fields: Mapping[str, Any]) -> int:
    alignment = fields.get(ALIGNMENT, DEFAULT_ALIGNMENT)
    is_power = isinstance(alignment, int) and 8 <= alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0
    if not is_power:
        raise GgufError(f"its field '{ALIGNMENT}' is {_shown(alignment)}, expected a power of 2, 8 to {MAX_ALIGNMENT}")
    return int(alignment)


def _shown(value: Any) -> str:
    return short(repr(value))


def _aligned(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


def _size_bytes(what: str, kind: TensorType, shape: tuple[int, ...]) -> int:
    if min(shape) < 1:
        raise GgufError(f"{what} has the shape {list(shape)}, expected dimensions of at least 1")
    if shape[-1] % kind.block:
        raise GgufError(f"{what} has rows of {shape[-1]} numbers, expected a multiple of {kind.block} ({kind.name})")
    return math.prod(shape) // kind.block * kind.block_bytes


def _check_overlaps(tensors: Mapping[str, TensorInfo]) -> None:
    by_place = sorted(tensors.items(), key=lambda item: item[1].offset)
    for (first, one), (second, other) in pairwise(by_place):
        if one.offset + one.size_bytes > other.offset:
            raise GgufError(f"its tensors '{short(first)}' and '{short(second)}' overlap")
