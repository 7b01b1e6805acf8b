"""Reads calls whose parameters are tagged text, and makes JSON of them.

For: the sections of calls. Does not know: what stands around a call. Invariant: a call whose parameters are not all
read has no end, and what is read behind them is content.
"""

from __future__ import annotations

import re

from .arguments import MAX_HEADER_CHARS, cut_off, end, read_arguments, read_header, start
from .reader import NotACall, Reader, Reading, markers
from .schema_types import Schemas, allowed_types, is_plain_text
from .sink import Sink
from .tables import TaggedCall
from .tagged_values import STRING, ValueWriter, quoted


class TaggedCallReader:
    """Reads the calls of one section, one after the other."""

    def __init__(
        self,
        reader: Reader,
        sink: Sink,
        call: TaggedCall,
        schemas: Schemas,
        section_ends: tuple[str, ...],
        *,
        strings_are_text: bool,
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._call = call
        self._schemas = schemas
        self._strings_are_text = strings_are_text
        self._ends = (*call.end, *section_ends)
        self._own_ends = call.end
        self._options = tuple(filter(None, (call.key_begin, call.json_begin, *self._ends)))
        """What may stand behind the header or a parameter."""
        self._has_any = False
        """Whether the call has had a parameter."""
        as_text = frozenset((call.key_begin, *call.end)) if call.may_omit_value_end else frozenset()
        breaks = frozenset((call.key_begin, *self._ends))
        texts = frozenset(filter(None, (call.value_end, call.text_begin)))
        self._value_ends = markers(breaks | texts, only_special=breaks - as_text)

    def read(self) -> Reading[str | None]:
        """Behind `call.begin`. Returns what it has read of what follows the call: the section's end, or None."""
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
            self._cut_off()
            return None
        self._sink.arguments("}" if self._has_any else "{}")
        end(reader, self._sink)
        return None if option in self._own_ends else option

    def _cut_off(self) -> None:
        """The call stays incomplete; what is held of it becomes content."""
        if self._reader.is_at_end:
            cut_off(self._reader)

    def _next_option(self) -> Reading[str | None]:
        yield from self._reader.skip_space()
        return (yield from self._reader.one_of(self._options))

    def _read_parameter(self, function: str) -> Reading[str | None]:
        """Behind `key_begin`. Returns what follows the parameter, None if that is no part of a call."""
        reader, call = self._reader, self._call
        key = yield from self._read_key()
        if key is None:
            return None
        reader.drop()
        self._sink.arguments(f"{', ' if self._has_any else '{'}{quoted(key['name'])}: ")
        self._has_any = True
        types = allowed_types(self._schemas.get(function), key["name"])
        value = ValueWriter(self._sink, types, trims_newline=call.trims_newline)
        if self._is_text(function, key, types):
            value.begin_string()
        found = yield from self._read_value(value)
        value.end(is_cut_off=not found and reader.is_cut_off)
        reader.hold()
        if found and found != call.value_end:
            return found
        return (yield from self._next_option())

    def _read_value(self, value: ValueWriter) -> Reading[str]:
        """Up to what ends the value, which is read and held; "" where the output ends before."""
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
        return is_plain_text(self._schemas.get(function), key["name"]) or (self._strings_are_text and types == STRING)

    def _read_key(self) -> Reading[re.Match[str] | None]:
        reader, call = self._reader, self._call
        text = ""
        while not text.endswith(call.key_end):
            symbol = yield from reader.peek()
            is_strange = reader.is_special and not (text + symbol).endswith(call.key_end)
            if not symbol or is_strange or len(text) > MAX_HEADER_CHARS:
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
