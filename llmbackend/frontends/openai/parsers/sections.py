"""Reads reasoning, then content and sections of calls in turns.

For: the output parser. Does not know: how single calls are written. Invariants: nothing is lost: what looked like a
section and is none is content, from its marker on; only layout next to calls is left out (white space, separators,
closing markers). Reasoning that is not closed extends to the end of the output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .events import Sink
from .json_calls import JsonCallReader, read_headed_call
from .literal_calls import LiteralCallReader
from .reader import NotACall, Reader, Reading, markers
from .schema_types import Schemas
from .tables import CallSyntax, HeadedCall, JsonCall, MarkedCalls, NestedCall, ReasoningFormat, TaggedCall
from .tagged_calls import NestedCallReader, TaggedCallReader

_OF_JSON = frozenset('[]{},:;" \n')


class MarkedCallsReader:
    """Owner: its OutputParser."""

    def __init__(
        self,
        reader: Reader,
        sink: Sink,
        table: MarkedCalls,
        reasoning: ReasoningFormat | None,
        schemas: Schemas,
        strings_are_text: bool,
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._table = table
        self._reasoning = reasoning
        self._schemas = schemas
        self._strings_are_text = strings_are_text
        self._content_begin = reasoning.content_begin if reasoning else ()
        self._content_end = reasoning.content_end if reasoning else ()
        self._begins = (*table.begin, *self._content_begin, *self._content_end)
        """What may stand where content may begin."""
        self._markers = markers(frozenset((*table.begin, *self._content_end)))
        self._calls = {call.begin: call for call in table.calls}
        lists = (table.list_begin,) if table.list_begin else ()
        self._first = (*self._calls, *lists)
        """What may stand behind a section's begin."""
        again = (begin for begin in self._calls if begin or not table.list_begin)
        self._next = (*again, *table.separators, *table.call_end, *table.end, *table.begin)
        """What may stand behind a call."""
        reader.boundaries = frozenset(_texts(table))
        reader.value_ends = markers(frozenset(_value_ends(table)))

    def read(self) -> Reading[None]:
        """All of the output."""
        marker = yield from self._read_beginning()
        while not self._reader.is_at_end or marker is not None:
            if marker is None:
                marker = yield from self._reader.until(self._markers, self._sink.content)
                if not marker:
                    return
            if marker in self._content_begin:
                self._reader.drop()
                marker = None
            elif marker in self._content_end or (yield from self._read_section(marker)):
                marker = yield from self._read_layout(self._begins, keeps_space=False)
            else:
                self._sink.content(self._reader.release())
                marker = None

    def _read_beginning(self) -> Reading[str | None]:
        """The reasoning, if there is any, and the marker behind it, if one is."""
        options = (*self._begins, *self._table.bare_begin)
        reasoning = self._reasoning
        if reasoning is None:
            return (yield from self._read_layout(options))
        if not self._sink.is_reasoning:
            marker = yield from self._read_layout((reasoning.start, *options))
            if marker != reasoning.start:
                return marker
            self._reader.drop()
        marker = yield from read_reasoning(self._reader, self._sink, reasoning)
        if marker != reasoning.end:
            return marker
        return (yield from self._read_layout(options))

    def _read_layout(self, options: Collection[str], *, keeps_space: bool = True) -> Reading[str | None]:
        """White space before a marker, and that marker, which is held; what is no layout becomes content.

        keeps_space: whether white space at the output's end is content
        """
        reader = self._reader
        reader.hold()
        try:
            yield from reader.skip_space()
            marker = yield from reader.one_of(options)
        except NotACall:
            marker = None
        if marker is None:
            text = reader.release()
            self._sink.content(text if keeps_space or not reader.is_at_end else text.lstrip())
        return marker

    def _read_section(self, marker: str) -> Reading[bool]:
        """Behind its marker, which is held. False where content goes on with what is held."""
        reader, table = self._reader, self._table
        option: str | None = marker
        options: tuple[str, ...] = self._first
        list_end: tuple[str, ...] = ()
        num_calls = self._sink.num_calls
        try:
            while option is not None:
                if option in self._calls:
                    following = yield from self._read_call(self._calls[option])
                    options = (*self._next, *list_end)
                    if following is not None:
                        option = following
                        continue
                elif option == table.list_begin:
                    options, list_end = tuple(self._calls), (table.list_end,)
                elif option in list_end:
                    options, list_end = (*table.call_end, *table.end, *table.begin), ()
                    reader.hold()
                elif option in table.call_end:
                    reader.hold()
                elif option in table.separators:
                    options = tuple(self._calls)
                elif option in table.end:
                    reader.drop()
                    return True
                else:
                    options, list_end = self._first, ()
                yield from reader.skip_space()
                option = yield from reader.one_of(options)
        except NotACall:
            return False
        return self._sink.num_calls > num_calls and options != self._first and reader.is_at_end

    def _read_call(self, call: CallSyntax) -> Reading[str | None]:
        """Reads a call. Returns the option behind it if that had to be read with it."""
        reader, sink = self._reader, self._sink
        if isinstance(call, JsonCall):
            yield from JsonCallReader(reader, sink, call, self._schemas.keys()).read()
        elif isinstance(call, HeadedCall):
            yield from read_headed_call(reader, sink, call)
        elif isinstance(call, TaggedCall):
            ends = (*self._table.end, *self._table.begin)
            tagged = TaggedCallReader(reader, sink, call, self._schemas, ends, strings_are_text=self._strings_are_text)
            return (yield from tagged.read())
        elif isinstance(call, NestedCall):
            nested = NestedCallReader(reader, sink, call, self._schemas, strings_are_text=self._strings_are_text)
            yield from nested.read()
        else:
            yield from LiteralCallReader(reader, sink, call, self._schemas.keys()).read()
        return None


def _texts(table: MarkedCalls) -> Iterator[str]:
    """What ends a value when it comes as a special token."""
    yield from (*table.begin, *table.end, *table.call_end, *(call.begin for call in table.calls))


def _value_ends(table: MarkedCalls) -> Iterator[str]:
    """The ends of calls that are not JSON, with the line end before them."""
    for end in (*table.end, *table.call_end):
        if not _OF_JSON.issuperset(end):
            yield from (end, f"\n{end}")


def read_reasoning(reader: Reader, sink: Sink, table: ReasoningFormat) -> Reading[str | None]:
    """Behind the start marker, or where the prompt has opened the reasoning.

    Returns the marker that ended it, which is held; None at the output's end.
    """
    sink.is_reasoning = True
    ends = (table.end, *table.ended_by)
    marker = yield from _read_start(reader, sink, (table.start, *ends))
    if marker not in ends:
        marker = yield from reader.until(markers(frozenset(ends)), sink.reasoning)
    sink.is_reasoning = not marker
    return marker or None


def _read_start(reader: Reader, sink: Sink, options: tuple[str, ...]) -> Reading[str | None]:
    """A marker as the first of the reasoning: some models repeat the start marker that the prompt has."""
    reader.hold()
    try:
        yield from reader.skip_space()
        marker = yield from reader.one_of(options)
    except NotACall:
        marker = None
    if marker is None:
        sink.reasoning(reader.release())
    return marker
