"""Reads JSON while it arrives: values byte for byte, ended by the balance of their brackets; strings; field names.

For: syntaxes whose arguments are JSON. Does not know: calls. Invariant: a value is passed on exactly as the model
wrote it, at once; it is not validated, since a client can be told nothing that is not the model's. A value that lacks
its last quote or bracket ends where its call does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .reader import SPACE, NotACall, Reader, Reading

_BRACKETS = re.compile(r'[{}\[\]"]')
_STRING_STOPS = re.compile(r'["\\]')


def read_value(reader: Reader, emit: Callable[[str], None]) -> Reading[bool]:
    """Passes one value on; False when it was cut off, by the output's end or by a marker's special token."""
    symbol = yield from reader.peek()
    if reader.is_special or not symbol:
        return False
    if symbol in "{[":
        return (yield from _read_balanced(reader, emit))
    if symbol == '"':
        return (yield from _read_quoted(reader, emit))
    return (yield from _read_scalar(reader, emit))


def _read_balanced(reader: Reader, emit: Callable[[str], None]) -> Reading[bool]:
    """An object or array; the next symbol is its first bracket."""
    balance = _Balance()
    while (yield from text_is_next(reader)):
        stop = reader.value_ends.first.search(reader.text, reader.at) if not reader.value_ends.is_empty else None
        most = stop.start() if stop else len(reader.text)
        end = balance.end_in(reader.text, reader.at, most)
        emit(reader.consume(end or most))
        if end:
            return True
        if stop and (yield from _read_end(reader, emit, balance)):
            return False
    return False


def _read_end(reader: Reader, emit: Callable[[str], None], balance: _Balance) -> Reading[bool]:
    """Reads the end of the call that a broken value belongs to; what only looks like one is passed on. A string may
    hold such a text, unless it is the output's last, or stands behind a line break, which no string of JSON has."""
    reader.hold()
    found = yield from reader.one_of(reader.value_ends.all)
    if found and not balance.is_in_string:
        return True
    if found:
        yield from reader.skip_space()
        if found[0] == "\n" or reader.is_at_end:
            return True
    text = reader.release() or reader.take()
    balance.end_in(text, 0, len(text))
    emit(text)
    return False


class _Balance:
    """How many brackets are open, where those within strings do not count."""

    __slots__ = ("_depth", "_is_escaped", "is_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self.is_in_string = False
        self._is_escaped = False
        """Whether the text so far ends with a backslash that escapes."""

    def end_in(self, text: str, at: int, until: int) -> int:
        """Where in the text the last bracket closes, which is read from `at` to `until`; 0 if it does not."""
        if self._is_escaped:
            at, self._is_escaped = at + 1, False
        while found := (_STRING_STOPS if self.is_in_string else _BRACKETS).search(text, at, until):
            at, symbol = found.end(), text[found.start()]
            if symbol == '"':
                self.is_in_string = not self.is_in_string
            elif symbol == "\\":
                self._is_escaped = at == until
                at += 1
            else:
                self._depth += 1 if symbol in "{[" else -1
                if not self._depth:
                    return at
        return 0


def _read_quoted(reader: Reader, emit: Callable[[str], None]) -> Reading[bool]:
    """A string with its quotes; the next symbol is the first of them."""
    emit(reader.take())
    is_escaped = False
    while (yield from text_is_next(reader)):
        if is_escaped:
            emit(reader.consume(reader.at + 1))
            is_escaped = False
            continue
        found = _STRING_STOPS.search(reader.text, reader.at)
        emit(reader.consume(found.end() if found else len(reader.text)))
        if found and found.group() == '"':
            return True
        is_escaped = found is not None
    return False


def _read_scalar(reader: Reader, emit: Callable[[str], None]) -> Reading[bool]:
    """A number, true, false or null, up to what cannot be part of one."""
    has_any = False
    while (symbol := (yield from reader.peek())) and not reader.is_special and symbol not in ',}]:;{["<' + SPACE:
        emit(reader.take())
        has_any = True
    return has_any


def text_is_next(reader: Reader) -> Reading[bool]:
    """Whether a character is next in a value. Special tokens are left out, except for markers, which end it."""
    while (yield from reader.peek()):
        if not reader.is_special:
            return True
        if any(marker.startswith(reader.text) for marker in reader.boundaries):
            return False
        reader.take()
    return False


def read_string(reader: Reader) -> Reading[str]:
    """The value of a string. Raises NotACall where none is."""
    if (yield from reader.peek()) != '"':
        raise NotACall
    pieces: list[str] = []
    if not (yield from _read_quoted(reader, pieces.append)):
        raise NotACall
    try:
        text: str = json.loads("".join(pieces), strict=False)
    except ValueError:
        raise NotACall from None
    return text
