"""Reads calls with JSON arguments, and provides values, headers, starts and ends for other syntaxes.

Invariants: a call starts when its name is known and its arguments begin; the text before that is held, so that it can
still become content. A value is emitted while it arrives, as the model writes it; without its closing quote or bracket,
it ends where its call ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from .events import Sink
from .reader import SPACE, CallInReasoning, NotACall, Reader, Reading
from .tables import HeadedCall, JsonCall

MAX_HEADER_CHARS = 512
_BRACKETS = re.compile(r'[{}\[\]"]')
_STRING_STOPS = re.compile(r'["\\]')


def read_value(reader: Reader, emit: Callable[[str], None]) -> Reading[bool]:
    """Emits one value; returns False if it was cut off by the end of the output or a marker's special token."""
    symbol = yield from reader.peek()
    if reader.is_special or not symbol:
        return False
    if symbol in "{[":
        return (yield from _read_balanced(reader, emit))
    if symbol == '"':
        return (yield from _read_quoted(reader, emit))
    return (yield from _read_scalar(reader, emit))


def _read_balanced(reader: Reader, emit: Callable[[str], None]) -> Reading[bool]:
    """Reads an object or array, starting at its first bracket."""
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
    """Reads the end of a call with an unfinished value; text that only resembles an end is emitted. Within a string, an
    end counts only at the end of the output or after a line break, which JSON strings cannot contain."""
    begin = reader.num_held  # a call whose name is not known yet is held as a whole
    if begin is None:
        reader.hold()
    found = yield from reader.one_of(reader.value_ends.all)
    if found and not balance.is_in_string:
        return True
    if found:
        yield from reader.skip_space()
        if found[0] == "\n" or reader.is_at_end:
            return True
    text = reader.release() if begin is None else reader.held_text(begin)
    text = text or reader.take()
    balance.end_in(text, 0, len(text))
    emit(text)
    return False


class _Balance:
    """Counts open brackets outside of strings."""

    __slots__ = ("_depth", "_is_escaped", "is_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self.is_in_string = False
        self._is_escaped = False
        """Whether the text so far ends with an escaping backslash."""

    def end_in(self, text: str, at: int, until: int) -> int:
        """The position after the bracket that closes the value, within text[at:until]; 0 if none does."""
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
    """Reads a string with its quotes, starting at the opening quote."""
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
    """Reads a number, true, false or null."""
    has_any = False
    while (symbol := (yield from reader.peek())) and not reader.is_special and symbol not in ',}]:;{["<' + SPACE:
        emit(reader.take())
        has_any = True
    return has_any


def text_is_next(reader: Reader) -> Reading[bool]:
    """Whether a value continues with a character. Special tokens are skipped, except markers, which end it."""
    while (yield from reader.peek()):
        if not reader.is_special:
            return True
        if any(marker.startswith(reader.text) for marker in reader.boundaries):
            return False
        reader.take()
    return False


def read_string(reader: Reader) -> Reading[str]:
    """The value of a JSON string. Raises NotACall."""
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


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def start(reader: Reader, sink: Sink, name: str, id: str | None = None) -> None:
    """Starts a call: the held text belongs to it and is not content. Within reasoning, raises CallInReasoning, or
    NotACall if it names no function of the request: the model may think about the format."""
    if sink.may_reason:
        raise CallInReasoning if name in sink.names else NotACall
    reader.drop()
    sink.start(name, id)


def end(reader: Reader, sink: Sink) -> None:
    """Ends a call. Following text is held; it is dropped if only white space precedes the next call."""
    sink.end()
    reader.hold()


def read_arguments(reader: Reader, sink: Sink, name: str, id: str | None) -> Reading[None]:
    """Starts the call and emits its arguments: an object, or a JSON string that contains one."""
    yield from reader.skip_space()
    symbol = yield from reader.peek()
    if symbol == "{" or not symbol:
        start(reader, sink, name, id)
        if (yield from read_value(reader, sink.arguments)):
            end(reader, sink)
        else:
            reader.hold()  # the call is incomplete
        return
    emit_arguments(reader, sink, name, id, (yield from _read_whole_arguments(reader)))


def _read_whole_arguments(reader: Reader) -> Reading[str]:
    pieces: list[str] = []
    if not (yield from read_value(reader, pieces.append)):
        raise NotACall
    return arguments_of("".join(pieces))


def arguments_of(value: str) -> str:
    """The JSON object of a whole value: the value itself, the object in a string, or {} for null. Raises NotACall."""
    if value == "null":
        return "{}"
    try:
        text = json.loads(value, strict=False) if value.startswith('"') else value
    except ValueError:
        raise NotACall from None
    if not text.lstrip().startswith("{"):
        raise NotACall
    return str(text)


def emit_arguments(reader: Reader, sink: Sink, name: str, id: str | None, text: str) -> None:
    """Emits a call with known arguments."""
    start(reader, sink, name, id)
    sink.arguments(text)
    end(reader, sink)


Header = tuple[str, str | None, str]
"""(name of the call, its id if the model wrote one, what ended the header)"""


def read_header(reader: Reader, ends: Collection[str], pattern: re.Pattern[str]) -> Reading[Header]:
    """Reads the text before the arguments, up to the first of `ends`, which is consumed unless it is the arguments'
    bracket. Raises NotACall if there is no name."""
    text, found = "", None
    while found is None:
        symbol = yield from reader.peek()
        if not symbol or len(text) > MAX_HEADER_CHARS:
            raise NotACall
        if symbol == "{" and symbol in ends:
            break
        else:
            text += reader.take()
            found = next((end for end in ends if text.endswith(end)), None)
    match = pattern.fullmatch(text.removesuffix(found or ""))
    if match is None:
        raise NotACall
    return match["name"], match.groupdict().get("id"), found or ""


def read_headed_call(reader: Reader, sink: Sink, call: HeadedCall) -> Reading[None]:
    """Starts after `call.begin`."""
    name, id, _ = yield from read_header(reader, call.header_end, call.header)
    yield from read_arguments(reader, sink, name, id)


class JsonCallReader:
    """Reads one object."""

    def __init__(self, reader: Reader, sink: Sink, call: JsonCall, names: Collection[str]) -> None:
        """names: the request's functions"""
        self._reader = reader
        self._sink = sink
        self._call = call
        self._names = names
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: str | None = None
        """Arguments that came before the name."""
        self._has_started = False

    def read(self) -> Reading[None]:
        """Starts after the object's opening bracket."""
        reader = self._reader
        try:
            while (yield from self._read_field()):
                pass
        except NotACall:
            if self._has_started:
                return  # the call is complete; the text held after its arguments is content
            if self._name is None or not reader.is_at_end:
                raise
            start(reader, self._sink, self._name, self._id)  # cut off between name and arguments
            self._has_started = True
        if not self._has_started:
            if self._name is None:
                raise NotACall
            emit_arguments(reader, self._sink, self._name, self._id, self._arguments or "{}")
        reader.hold()

    def _read_field(self) -> Reading[bool]:
        """Reads one field and the comma after it; returns False at the object's end."""
        reader = self._reader
        yield from reader.skip_space()
        if (yield from reader.one_of(("}",))):
            return False
        key = yield from read_string(reader)
        yield from reader.expect((":",))
        yield from reader.skip_space()
        yield from self._read_value_of(key)
        return (yield from reader.expect((",", "}"))) == ","

    def _read_value_of(self, key: str) -> Reading[None]:
        call = self._call
        if self._has_started:
            yield from self._skip_value()
        elif not call.name_key:
            self._set_name(key)
            yield from self._read_arguments()
        elif key == call.name_key and self._name is None:
            self._set_name((yield from read_string(self._reader)))
        elif key == call.id_key and (yield from self._reader.peek()) == '"':
            self._id = (yield from read_string(self._reader)) or None
        elif key == call.id_key:
            yield from self._skip_value()
        elif key in ("arguments", "parameters") and self._arguments is None:
            yield from self._read_arguments()
        elif call.other_keys is None or key in call.other_keys:
            yield from self._skip_value()
        else:
            raise NotACall

    def _set_name(self, name: str) -> None:
        if not name or len(name) > MAX_HEADER_CHARS or (self._call.only_known_names and name not in self._names):
            raise NotACall
        self._name = name

    def _read_arguments(self) -> Reading[None]:
        if self._name is not None:
            yield from read_arguments(self._reader, self._sink, self._name, self._id)
            self._has_started = True
            return
        self._arguments = yield from _read_whole_arguments(self._reader)

    def _skip_value(self) -> Reading[None]:
        if not (yield from read_value(self._reader, lambda _: None)):
            raise NotACall
