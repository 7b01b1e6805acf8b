"""Reads calls whose parameters are tags of their own names, with tags of members and items in them, and makes JSON.

For: the sections of calls. Does not know: what stands around a call. Invariant: whether tags within a value are members
of an object or items of a list follows the function's schema; where it does not say, a first tag `item` is an item.
"""

from __future__ import annotations

from .arguments import MAX_HEADER_CHARS, cut_off, end, read_header, start
from .reader import Reader, Reading, markers
from .schema_types import Schema, Schemas, is_any_string, item_of, member_of, types_of
from .sink import Sink
from .tables import NestedCall
from .tagged_values import STRING, ValueWriter, quoted

_ITEM = "item"
_MAX_DEPTH = 64
_EMPTY = {"array": "[]", "object": "{}"}


class NestedCallReader:
    """Reads one call."""

    def __init__(
        self, reader: Reader, sink: Sink, call: NestedCall, schemas: Schemas, *, strings_are_text: bool
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._call = call
        self._schemas = schemas
        self._strings_are_text = strings_are_text
        self._marks = markers(frozenset((call.mark,)))
        self._schema: Schema = {}
        """Of the call's function."""

    def read(self) -> Reading[None]:
        """Behind `call.begin`."""
        reader, call = self._reader, self._call
        name, id, _ = yield from read_header(reader, call.header_end, call.header)
        start(reader, self._sink, name, id)
        self._schema = self._schemas.get(name) or {}
        if (yield from self._read_members(self._schema, is_list=False)):
            end(reader, self._sink)
        elif reader.is_at_end:
            cut_off(reader)

    def _read_members(self, description: object, *, is_list: bool, first: str = "", depth: int = 0) -> Reading[bool]:
        """Those of an object or a list, with the tag that closes it. False where it is not complete.

        first: the name of the first tag, if that is already read
        """
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
        if separator != ", ":  # there was none
            sink.arguments(separator)
        sink.arguments("]" if is_list else "}")
        return True

    def _next_member(self) -> Reading[str | None]:
        """The name of the next tag; "" behind the one that closes what the members belong to, or where the model has
        ended its output; None where neither is there."""
        reader = self._reader
        reader.hold()
        yield from reader.skip_space()
        if reader.is_at_end and not reader.is_cut_off:
            return ""
        if (yield from reader.one_of((self._call.mark,))) is None:
            return None
        return (yield from self._read_tag())

    def _read_tag(self) -> Reading[str | None]:
        """Behind its mark: the name of an opening tag, "" for a closing one, None for what is no tag."""
        reader, name = self._reader, ""
        yield from reader.skip_space()
        opening = yield from reader.one_of(("<", "</"))
        while opening and not name.endswith(">"):
            if not (yield from reader.peek()) or reader.is_special or len(name) > MAX_HEADER_CHARS:
                return None
            name += reader.take()
        return None if not opening else "" if opening == "</" else name[:-1].strip() or None

    def _read_value(self, description: object, depth: int) -> Reading[bool]:
        """Behind its tag, with the one that closes it. False where it is not complete."""
        reader = self._reader
        reader.drop()
        types = types_of(description, self._schema)
        value = ValueWriter(self._sink, types, trims_newline=False)
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
