"""Reads calls whose arguments are literals of a language such as Python, and converts them to JSON as they arrive. A
literal is emitted when its JSON is certain; other text leaves the call incomplete, and becomes content."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection
from string import hexdigits
from typing import NoReturn

from .events import Sink
from .json_calls import MAX_HEADER_CHARS, end, quoted, read_header, start, text_is_next
from .reader import SPACE, NotACall, Reader, Reading, markers
from .tables import ANY_NAME, LiteralCall

_MAX_DEPTH = 64
_WORD_ENDS = frozenset(",:=()[]{}\"'" + SPACE)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_PLAIN = re.compile(r"[^\"'\\]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_CLOSES = {"[": "]", "(": ")", "{": "}"}
_CODES = {"x": 2, "u": 4, "U": 8}


class LiteralCallReader:
    """Reads one call. Each literal is held while it is read."""

    def __init__(self, reader: Reader, sink: Sink, call: LiteralCall, names: Collection[str]) -> None:
        """names: the request's functions"""
        self._reader = reader
        self._sink = sink
        self._call = call
        self._names = names

    def read(self) -> Reading[None]:
        """Starts after `call.begin`."""
        reader, call = self._reader, self._call
        name, id, opened = yield from read_header(reader, (call.open,), ANY_NAME)
        if not opened:
            reader.take()  # the "{" that the header left unread
        if call.only_known_names and name not in self._names:
            raise NotACall
        key = yield from self._read_key()
        start(reader, self._sink, name, id)
        try:
            separator = "{"
            while key:
                self._sink.arguments(f"{separator}{quoted(key)}: ")
                yield from self._read_value(0)
                key, separator = (yield from self._read_next_key()), ", "
        except NotACall:
            return  # the text held after the last complete literal is content
        self._sink.arguments("{}" if separator == "{" else "}")
        end(reader, self._sink)

    # Keys.

    def _read_key(self) -> Reading[str]:
        """Reads an argument's key, up to its value; returns "" at the call's end, which is consumed."""
        reader, call = self._reader, self._call
        yield from reader.skip_space()
        if (yield from reader.one_of((call.close,))):
            return ""
        key = yield from self._read_word()
        yield from reader.expect((call.assign,))
        return key

    def _read_next_key(self) -> Reading[str]:
        """Like `_read_key`, but after an argument."""
        self._reader.hold()
        if (yield from self._reader.expect((",", self._call.close))) != ",":
            return ""
        return (yield from self._read_key())

    # Values.

    def _read_value(self, depth: int) -> Reading[None]:
        reader, sink = self._reader, self._sink
        if depth > _MAX_DEPTH:
            raise NotACall
        reader.hold()
        begin = yield from reader.expect(("[", "(", "{", *self._call.quotes, ""))
        if begin in self._call.quotes:
            yield from self._read_string(begin)
        elif begin:
            yield from self._read_items(_CLOSES[begin], depth + 1)
        else:
            sink.arguments(_json_of_word((yield from self._read_word()), is_whole=not reader.is_at_end))

    def _read_items(self, close: str, depth: int) -> Reading[None]:
        """Reads a sequence or a mapping. Starts after its opening bracket."""
        reader, sink, is_mapping = self._reader, self._sink, close == "}"
        sink.arguments("{" if is_mapping else "[")
        separator = ""
        while not (yield from self._closes(close)):
            sink.arguments(separator)
            if is_mapping:
                yield from self._read_mapping_key()
                yield from reader.expect((":",))
                sink.arguments(": ")
            yield from self._read_value(depth)
            separator = ", "
            reader.hold()
            if (yield from reader.expect((",", close))) == close:
                break
        sink.arguments("}" if is_mapping else "]")

    def _closes(self, close: str) -> Reading[bool]:
        """Whether a sequence or mapping closes here; if so, its end is consumed."""
        self._reader.hold()
        yield from self._reader.skip_space()
        return bool((yield from self._reader.one_of((close,))))

    def _read_mapping_key(self) -> Reading[None]:
        quote = yield from self._reader.one_of((*self._call.quotes, ""))
        if quote:
            yield from self._read_string(quote)
        else:
            self._sink.arguments(quoted((yield from self._read_word())))

    def _read_word(self) -> Reading[str]:
        """Reads a key or a value without quotes."""
        reader, word = self._reader, ""
        while (symbol := (yield from reader.peek())) and not reader.is_special and symbol not in _WORD_ENDS:
            word += reader.take()
            if len(word) > MAX_HEADER_CHARS:
                raise NotACall
        if not word:
            raise NotACall
        return word

    # Strings.

    def _give_up(self) -> NoReturn:
        """Stops at an unfinished string, of which nothing is held."""
        self._reader.hold()
        raise NotACall

    def _read_string(self, quote: str) -> Reading[None]:
        """Starts after the opening quote."""
        reader, sink = self._reader, self._sink
        reader.drop()
        sink.arguments('"')
        if len(quote) > 1:
            if not (yield from reader.until(markers(frozenset((quote,))), lambda text: sink.arguments(_escaped(text)))):
                self._give_up()
            reader.drop()
        else:
            yield from self._read_escaped(quote)
        sink.arguments('"')

    def _read_escaped(self, quote: str) -> Reading[None]:
        reader, sink = self._reader, self._sink
        while (yield from text_is_next(reader)):
            if plain := _PLAIN.match(reader.text, reader.at):
                sink.arguments(_escaped(reader.consume(plain.end())))
                continue
            symbol = reader.take()
            if symbol == quote:
                return
            if symbol == "\\":
                yield from self._read_escape()
            else:
                sink.arguments(_escaped(symbol))
        self._give_up()

    def _read_escape(self) -> Reading[None]:
        """Starts after a backslash. An unknown escape is kept literally, as in Python."""
        reader, sink = self._reader, self._sink
        if not (yield from text_is_next(reader)):
            self._give_up()
        symbol = reader.take()
        if symbol not in _CODES:
            known = symbol in _ESCAPES or symbol in "\\/'\""
            sink.arguments(_escaped(_ESCAPES.get(symbol, symbol) if known else "\\" + symbol))
            return
        digits = ""
        while (
            len(digits) < _CODES[symbol] and (yield from text_is_next(reader)) and reader.text[reader.at] in hexdigits
        ):
            digits += reader.take()
        sink.arguments(_json_of_code(symbol, digits))


def _json_of_code(kind: str, digits: str) -> str:
    """JSON of \\xhh, \\uhhhh or \\Uhhhhhhhh, written as an escape, so that halves of surrogate pairs are preserved."""
    if len(digits) != _CODES[kind] or int(digits, 16) > sys.maxunicode:
        return _escaped(f"\\{kind}{digits}")
    return json.dumps(chr(int(digits, 16)))[1:-1]


def _json_of_word(word: str, *, is_whole: bool) -> str:
    """JSON of a number or constant. Raises NotACall for any other word, unless the output's end has cut it off."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    for number in (lambda: int(word, 0), lambda: float(word)):  # also 0x10 and 1_000
        try:
            return json.dumps(number(), allow_nan=False)
        except ValueError:
            continue
    if not is_whole:
        return word
    raise NotACall


def _escaped(text: str) -> str:
    return quoted(text)[1:-1]
