"""Reads calls whose arguments are JSON: one object with name and arguments, or a header with the name before them.

For: the sections of calls. Does not know: what stands around a call. Invariant: an object whose arguments come before
its name is a call too; its arguments wait for the name.
"""

from __future__ import annotations

from collections.abc import Collection

from .arguments import MAX_HEADER_CHARS, held_arguments, read_arguments, read_header, start, whole_arguments
from .json_values import read_string, read_value
from .reader import NotACall, Reader, Reading
from .sink import Sink
from .tables import HeadedCall, JsonCall


def read_headed_call(reader: Reader, sink: Sink, call: HeadedCall) -> Reading[None]:
    """Behind `call.begin`."""
    name, id, _ = yield from read_header(reader, call.header_end, call.header)
    yield from read_arguments(reader, sink, name, id)


class JsonCallReader:
    """Reads one object; its state is what the object has told so far."""

    def __init__(self, reader: Reader, sink: Sink, call: JsonCall, names: Collection[str]) -> None:
        """names: the request's functions"""
        self._reader = reader
        self._sink = sink
        self._call = call
        self._names = names
        self._name: str | None = None
        self._id: str | None = None
        self._arguments: str | None = None
        """Those that came before the name."""
        self._has_started = False

    def read(self) -> Reading[None]:
        """Behind the object's first bracket."""
        reader = self._reader
        try:
            while (yield from self._read_field()):
                pass
        except NotACall:
            if self._has_started:
                return  # the call stands; what is held behind its arguments is content
            if self._name is None or not reader.is_at_end:
                raise
            start(reader, self._sink, self._name, self._id)  # cut off between name and arguments
            self._has_started = True
        if not self._has_started:
            self._end_without_arguments()
        reader.hold()

    def _read_field(self) -> Reading[bool]:
        """Reads one field and the comma behind it; False at the object's end."""
        reader = self._reader
        yield from reader.skip_space()
        if (yield from reader.one_of(("}",))):
            return False
        key = yield from read_string(reader)
        yield from self._expect((":",))
        yield from reader.skip_space()
        yield from self._read_value_of(key)
        return (yield from self._expect((",", "}"))) == ","

    def _expect(self, options: Collection[str]) -> Reading[str]:
        yield from self._reader.skip_space()
        found = yield from self._reader.one_of(options)
        if found is None:
            raise NotACall
        return found

    def _read_value_of(self, key: str) -> Reading[None]:
        call = self._call
        if self._has_started:
            yield from self._skip_value()
        elif not call.name_key:
            self._set_name(key)
            yield from self._read_arguments()
        elif key == call.name_key and self._name is None:
            self._set_name((yield from read_string(self._reader)))
        elif key == call.id_key:
            self._id = yield from read_string(self._reader)
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
        pieces: list[str] = []
        if not (yield from read_value(self._reader, pieces.append)):
            raise NotACall
        self._arguments = held_arguments("".join(pieces))

    def _skip_value(self) -> Reading[None]:
        if not (yield from read_value(self._reader, lambda _: None)):
            raise NotACall

    def _end_without_arguments(self) -> None:
        if self._name is None:
            raise NotACall
        whole_arguments(self._reader, self._sink, self._name, self._id, self._arguments or "{}")
