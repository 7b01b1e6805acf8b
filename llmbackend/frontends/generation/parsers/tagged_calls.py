"""Reads calls with tagged parameters, including nested tags of members and items, and converts them to JSON.

Invariants: a value that can only be a string is emitted at once; any other value is held until its end, up to
MAX_HELD_CHARS; a longer one is emitted as the model writes it if it can only be a list or an object, otherwise as a
string. A call with an unread parameter has no end, and the text after it is content.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from .events import Sink
from .json_calls import MAX_HEADER_CHARS, end, quoted, read_arguments, read_header, start
from .reader import MAX_HELD_CHARS, NotACall, Reader, Reading, markers
from .schema_types import (
    Schema,
    Schemas,
    allowed_types,
    is_any_string,
    is_plain_text,
    item_of,
    json_of,
    member_of,
    types_of,
)
from .tables import NestedCall, TaggedCall

STRING = frozenset(("string",))


class ValueWriter:
    """Converts one value to JSON, piece by piece."""

    def __init__(self, sink: Sink, types: frozenset[str], *, trims_newline: bool, strings_are_text: bool) -> None:
        self._sink = sink
        self._types = types
        self._strings_are_text = strings_are_text
        self._trims = trims_newline
        self._pieces: list[str] = []
        self._num_chars = 0
        self._newline = ""
        """The last newline, which is layout at the value's end."""
        self._is_first = True
        self._is_string = False
        self._is_json = False
        """Whether a long value is emitted as the model writes it."""

    def begin_string(self) -> None:
        """Marks the value as a string, even if its text is a number or JSON."""
        self._is_string = True
        self._sink.arguments('"' + quoted("".join(self._pieces))[1:-1])

    @property
    def is_blank(self) -> bool:
        """Whether the value is white space so far and not known to be a string."""
        return not self._is_string and not any(map(str.strip, self._pieces))

    def push(self, text: str) -> None:
        if not (text := self._trimmed(text)):
            return
        if self._is_string:
            self._sink.arguments(quoted(text)[1:-1])
            return
        if self._is_json:
            self._sink.arguments(text)
            return
        self._pieces.append(text)
        self._num_chars += len(text)
        if self._num_chars > MAX_HELD_CHARS:
            self._stop_holding()

    def _stop_holding(self) -> None:
        text = "".join(self._pieces)
        if self._types and "string" not in self._types and text.lstrip()[:1] in ("[", "{"):
            self._is_json = True
            self._sink.arguments(text)
        else:
            self.begin_string()

    def _trimmed(self, text: str) -> str:
        if not text or not self._trims:
            return text
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
        text, self._newline = self._newline + text, ""
        if text.endswith("\n"):
            text, self._newline = text[:-1], "\n"
        return text

    def end(self, *, is_cut_off: bool) -> None:
        if self._is_string:
            self._sink.arguments("" if is_cut_off else '"')
        elif self._is_json:
            return
        elif is_cut_off:
            self._sink.arguments("".join(self._pieces))
        else:
            self._sink.arguments(json_of("".join(self._pieces), self._types, strings_are_text=self._strings_are_text))


class TaggedCallReader:
    """Reads the calls of one section."""

    def __init__(
        self,
        reader: Reader,
        sink: Sink,
        call: TaggedCall,
        schemas: Schemas,
        section_ends: tuple[str, ...],
        free_functions: Collection[str],
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._call = call
        self._schemas = schemas
        self._free_functions = free_functions
        self._ends = (*call.end, *section_ends)
        self._options = tuple(filter(None, (call.key_begin, call.json_begin, *self._ends)))
        """Options after the header or a parameter."""
        self._has_any = False
        """Whether the call has a parameter so far."""
        as_text = frozenset((call.key_begin, *call.end)) if call.may_omit_value_end else frozenset()
        breaks = frozenset((call.key_begin, *self._ends))
        texts = frozenset(filter(None, (call.value_end, call.text_begin)))
        self._value_ends = markers(breaks | texts, only_special=breaks - as_text)

    def read(self) -> Reading[str | None]:
        """Starts after `call.begin`. Returns the end of the section if it was read together with the call."""
        reader, call = self._reader, self._call
        name, id, found = yield from read_header(reader, (*call.header_end, call.key_begin, *self._ends), call.header)
        option: str | None = found
        if found in call.header_end:
            option = yield from self._next_option()
        if option is None and not reader.is_at_end:
            raise NotACall
        if option and option == call.json_begin:
            yield from read_arguments(reader, self._sink, name, id)
            return None
        start(reader, self._sink, name, id)
        self._has_any = False
        while option == call.key_begin:
            option = yield from self._read_parameter(name)
        if option is None and (reader.is_cut_off or not reader.is_at_end):
            if reader.is_at_end:
                reader.hold()
            return None
        self._sink.arguments("}" if self._has_any else "{}")
        end(reader, self._sink)
        return None if option in self._call.end else option

    def _next_option(self) -> Reading[str | None]:
        yield from self._reader.skip_space()
        return (yield from self._reader.one_of(self._options))

    def _read_parameter(self, function: str) -> Reading[str | None]:
        """Starts after `key_begin`. Returns the text after the parameter; None if this is not part of a call."""
        reader, call = self._reader, self._call
        key = yield from self._read_key()
        if key is None:
            return None
        reader.drop()
        self._sink.arguments(f"{', ' if self._has_any else '{'}{quoted(key['name'])}: ")
        self._has_any = True
        types = allowed_types(self._schemas.get(function), key["name"])
        is_marked = "text" in call.key.groupindex
        value = ValueWriter(
            self._sink,
            types,
            trims_newline=call.trims_newline,
            strings_are_text=function in self._free_functions and not is_marked,
        )
        if self._is_text(function, key, types):
            value.begin_string()
        found = yield from self._read_value(value)
        value.end(is_cut_off=not found and reader.is_cut_off)
        reader.hold()
        if found and found != call.value_end:
            return found
        return (yield from self._next_option())

    def _read_value(self, value: ValueWriter) -> Reading[str]:
        """Returns what ends the value, which is held; "" at the output's end."""
        reader, call = self._reader, self._call
        found = yield from reader.until(self._value_ends, value.push)
        while found and found == call.text_begin:
            reader.drop()
            if not (yield from reader.until(markers(frozenset((call.text_end,))), value.push)):
                return ""
            reader.drop()
            found = yield from reader.until(self._value_ends, value.push)
        return found

    def _is_text(self, function: str, key: re.Match[str], types: frozenset[str]) -> bool:
        """Whether the value can only be a string."""
        if "text" in self._call.key.groupindex:
            return key["text"] is not None
        is_free = function in self._free_functions
        return is_plain_text(self._schemas.get(function), key["name"]) or (is_free and types == STRING)

    def _read_key(self) -> Reading[re.Match[str] | None]:
        reader, call = self._reader, self._call
        text = ""
        while not text.endswith(call.key_end):
            symbol = yield from reader.peek()
            is_unexpected = reader.is_special and not (text + symbol).endswith(call.key_end)
            if not symbol or is_unexpected or len(text) > MAX_HEADER_CHARS:
                return None
            text += reader.take()
        key = call.key.fullmatch(text.removesuffix(call.key_end))
        if key is None:
            return None
        if call.value_begin:
            yield from reader.skip_space()
            if (yield from reader.one_of((call.value_begin,))) is None:
                return None
        return key


_ITEM = "item"
_MAX_DEPTH = 64
_EMPTY = {"array": "[]", "object": "{}"}


class NestedCallReader:
    """Reads one call."""

    def __init__(
        self, reader: Reader, sink: Sink, call: NestedCall, schemas: Schemas, free_functions: Collection[str]
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._call = call
        self._schemas = schemas
        self._free_functions = free_functions
        self._strings_are_text = False
        """Whether the called function is free."""
        self._marks = markers(frozenset((call.mark,)))
        self._schema: Schema = {}
        """The schema of the called function."""

    def read(self) -> Reading[None]:
        """Starts after `call.begin`."""
        reader, call = self._reader, self._call
        name, id, _ = yield from read_header(reader, call.header_end, call.header)
        start(reader, self._sink, name, id)
        self._schema = self._schemas.get(name) or {}
        self._strings_are_text = name in self._free_functions
        if (yield from self._read_members(self._schema, is_list=False)):
            end(reader, self._sink)
        elif reader.is_at_end:
            reader.hold()

    def _read_members(self, description: object, *, is_list: bool, first: str = "", depth: int = 0) -> Reading[bool]:
        """Reads an object or a list with its closing tag; returns False if it is incomplete. first: the name of the
        first tag, if that was already read"""
        sink, separator = self._sink, "[" if is_list else "{"
        name: str | None = first or (yield from self._next_member())
        while name:
            sink.arguments(separator if is_list else f"{separator}{quoted(name)}: ")
            separator = ", "
            child = item_of(description, self._schema) if is_list else member_of(description, name, self._schema)
            if not (yield from self._read_value(child, depth + 1)):
                return False
            name = yield from self._next_member()
        if name is None:
            return False
        if separator != ", ":  # there was no separator
            sink.arguments(separator)
        sink.arguments("]" if is_list else "}")
        return True

    def _next_member(self) -> Reading[str | None]:
        """The name of the next tag; "" after the closing tag or at the end of a complete output; None for neither."""
        reader = self._reader
        reader.hold()
        yield from reader.skip_space()
        if reader.is_at_end and not reader.is_cut_off:
            return ""
        if (yield from reader.one_of((self._call.mark,))) is None:
            return None
        return (yield from self._read_tag())

    def _read_tag(self) -> Reading[str | None]:
        """Starts after the tag's first character. Returns the opened tag's name, "" for a closing tag, otherwise
        None."""
        reader, name = self._reader, ""
        yield from reader.skip_space()
        opening = yield from reader.one_of(("<", "</"))
        while opening and not name.endswith(">"):
            if not (yield from reader.peek()) or reader.is_special or len(name) > MAX_HEADER_CHARS:
                return None
            name += reader.take()
        return None if not opening else "" if opening == "</" else name[:-1].strip() or None

    def _read_value(self, description: object, depth: int) -> Reading[bool]:
        """Starts after the opening tag and also reads the closing one; returns False if the value is incomplete."""
        reader = self._reader
        reader.drop()
        types = types_of(description, self._schema)
        value = ValueWriter(self._sink, types, trims_newline=False, strings_are_text=self._strings_are_text)
        if is_any_string(description, self._schema) or (self._strings_are_text and types == STRING):
            value.begin_string()
        if not (yield from reader.until(self._marks, value.push)):
            value.end(is_cut_off=reader.is_cut_off)
            return not reader.is_cut_off
        name = yield from self._read_tag()
        if name and value.is_blank and depth < _MAX_DEPTH:
            is_list = name == _ITEM if ("array" in types) == ("object" in types) else "array" in types
            return (yield from self._read_members(description, is_list=is_list, first=name, depth=depth))
        empty = next((text for kind, text in _EMPTY.items() if kind in types), "") if value.is_blank else ""
        if empty and name == "":
            self._sink.arguments(empty)
        else:
            value.end(is_cut_off=name != "")
        return name == ""
