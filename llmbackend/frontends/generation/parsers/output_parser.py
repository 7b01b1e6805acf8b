"""OutputParser: splits the tokens of one choice into content, reasoning and tool calls.

Invariants: the joined pieces do not depend on how the text was split into tokens. Special tokens are not part of the
text unless they are shown. The work is linear in the output, and held text is bounded. A section that turns out to
contain no call is content, including its marker; only layout next to calls is dropped. Unclosed reasoning extends to
the first call of one of the request's functions, or to the end of the output; a call inside reasoning is held until it
is certain that no end marker follows. If the output consists of messages, text outside of any message is content.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from .events import Event, ReasoningDelta, Sink
from .json_calls import MAX_HEADER_CHARS, JsonCallReader, read_headed_call
from .literal_calls import LiteralCallReader
from .reader import MAX_HELD_CHARS, CallInReasoning, NotACall, Reader, Reading, markers
from .schema_types import Schemas
from .tables import (
    CallSyntax,
    HeadedCall,
    JsonCall,
    LiteralCall,
    MarkedCalls,
    Messages,
    NestedCall,
    ReasoningFormat,
    TaggedCall,
    ToolCallFormat,
)
from .tagged_calls import NestedCallReader, TaggedCallReader

_OF_JSON = frozenset('[]{},:;" \n')


class MarkedCallsReader:
    """Reads an output with marked calls. Owned by an OutputParser."""

    def __init__(
        self,
        reader: Reader,
        sink: Sink,
        table: MarkedCalls,
        reasoning: ReasoningFormat | None,
        schemas: Schemas,
        free_functions: Collection[str],
    ) -> None:
        self._reader = reader
        self._sink = sink
        self._table = table
        self._reasoning = reasoning
        self._schemas = schemas
        self._free_functions = free_functions
        self._content_begin = reasoning.content_begin if reasoning else ()
        self._content_end = reasoning.content_end if reasoning else ()
        self._begins = (*table.begin, *self._content_begin, *self._content_end)
        """Markers at which content may begin."""
        self._markers = markers(frozenset((*table.begin, *self._content_end)))
        self._calls = {call.begin: call for call in table.calls}
        lists = (table.list_begin,) if table.list_begin else ()
        self._first = (*self._calls, *lists)
        """Options after the start of a section."""
        unmarked = not table.list_begin and any(isinstance(call, LiteralCall) for call in table.calls)
        again = (begin for begin in self._calls if begin or unmarked)
        self._next = (*again, *table.separators, *table.call_end, *table.end, *table.begin)
        """Options after a call."""
        reader.boundaries = frozenset(_texts(table))
        reader.value_ends = markers(frozenset(_value_ends(table)))

    def read(self) -> Reading[None]:
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
        """Reads the reasoning, if any; returns the marker after it, if any."""
        options = (*self._begins, *self._table.bare_begin)
        reasoning = self._reasoning
        if reasoning is None:
            return (yield from self._read_layout(options))
        if not self._sink.is_reasoning:
            self._sink.may_reason = True
            marker = yield from self._read_layout((reasoning.start, *options))
            self._sink.may_reason = False
            if marker != reasoning.start:
                return marker
            self._reader.drop()
        return (yield from self._read_reasoning(reasoning))

    def _read_reasoning(self, table: ReasoningFormat) -> Reading[str | None]:
        """Starts in reasoning, of which nothing is held. Returns the marker after it, if any, which is held."""
        reader, sink = self._reader, self._sink
        while True:
            sink.is_reasoning, sink.may_reason = True, False
            begins = self._table.begin if reader.num_unread_chars <= MAX_HELD_CHARS else ()
            ends = (table.end, *begins)
            marker = yield from reader.hold_marker((table.start, *ends))  # some models repeat the prompt's start marker
            if marker is None:
                sink.reasoning(reader.release())
            if marker not in ends:
                marker = yield from reader.until(markers(frozenset(ends)), sink.reasoning)
            sink.is_reasoning = not marker
            if not marker:
                return None
            if marker == table.end:
                return (yield from self._read_layout((*self._begins, *self._table.bare_begin)))
            if (yield from self._calls_end_reasoning(marker, table.end)):
                return (yield from self._read_layout(self._begins))

    def _calls_end_reasoning(self, marker: str, end: str) -> Reading[bool]:
        """Whether the marker, which is held, begins calls that end the reasoning: `end` does not follow them. They are
        unread then; otherwise, what was read is reasoning."""
        reader, sink = self._reader, self._sink
        begin = reader.num_held or 0
        sink.may_reason = True
        try:
            yield from self._read_section(marker)
        except CallInReasoning:
            begin = yield from self._find(end)
        sink.may_reason = False
        sink.reasoning(reader.unread(begin))
        return not begin

    def _find(self, end: str) -> Reading[int]:
        """Reads and holds text up to `end`. Returns the held piece that begins it; 0 if there is none within bounds."""
        reader = self._reader
        with contextlib.suppress(NotACall):
            while (yield from reader.peek()):
                begin = reader.num_held or 0
                if (yield from reader.one_of((end,))):
                    return begin
                if begin == reader.num_held:
                    reader.take()
        return 0

    def _read_layout(self, options: Collection[str], *, keeps_space: bool = True) -> Reading[str | None]:
        """Reads white space and a marker, which is held; other text is content. keeps_space: white space at the end of
        the output is content, too"""
        reader = self._reader
        marker = yield from reader.hold_marker(options)
        if marker is None:
            text = reader.release()
            self._sink.content(text if keeps_space or not reader.is_at_end else text.lstrip())
        return marker

    def _read_section(self, marker: str) -> Reading[bool]:
        """Starts after the section's marker, which is still held. Returns False if the held text is content."""
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
        """Returns the option after the call if it had to be read with it."""
        reader, sink = self._reader, self._sink
        if isinstance(call, JsonCall):
            yield from JsonCallReader(reader, sink, call, self._schemas.keys()).read()
        elif isinstance(call, HeadedCall):
            yield from read_headed_call(reader, sink, call)
        elif isinstance(call, TaggedCall):
            ends = (*self._table.end, *self._table.begin)
            tagged = TaggedCallReader(reader, sink, call, self._schemas, ends, self._free_functions)
            return (yield from tagged.read())
        elif isinstance(call, NestedCall):
            nested = NestedCallReader(reader, sink, call, self._schemas, self._free_functions)
            yield from nested.read()
        else:
            yield from LiteralCallReader(reader, sink, call, self._schemas.keys()).read()
        return None


def _texts(table: MarkedCalls) -> Iterator[str]:
    """Special tokens that end a value."""
    yield from (*table.begin, *table.end, *table.call_end, *(call.begin for call in table.calls))


def _value_ends(table: MarkedCalls) -> Iterator[str]:
    """The ends of calls that cannot be JSON, with and without a line break before them."""
    for end in (*table.end, *table.call_end):
        if not _OF_JSON.issuperset(end):
            yield from (end, f"\n{end}")


_RECIPIENT = re.compile(r"\bto=([^\s<]{1,256})")


class MessagesReader:
    """Reads an output that consists of messages. Owned by an OutputParser."""

    def __init__(
        self, reader: Reader, sink: Sink, table: Messages, *, reads_calls: bool, names: Collection[str]
    ) -> None:
        """reads_calls: messages to functions are calls; otherwise they are content
        names: the request's functions, which a recipient may name without the prefix
        """
        self._reader = reader
        self._sink = sink
        self._table = table
        self._reads_calls = reads_calls
        self._names = names
        self._header_begins = (table.start, table.channel)
        texts = frozenset((*self._header_begins, table.message, *table.end))
        self._markers = markers(texts, only_special=texts)
        self._channel = re.compile(re.escape(table.channel) + r"\s*(\w+)")
        self._content = _Joined(sink.content)
        self._reasons = _Joined(sink.reasoning)

    def read(self) -> Reading[None]:
        marker = yield from self._read_first()
        while marker:
            if marker in self._header_begins:
                marker = yield from self._read_message(marker)
            else:
                marker = yield from self._read_text(self._content)

    def _read_first(self) -> Reading[str]:
        """Reads the rest of the message that the prompt has begun."""
        if self._sink.is_reasoning:
            return (yield from self._read_reasoning())
        self._reader.hold()
        if (yield from self._reader.one_of((" to=", "to="))):
            return (yield from self._read_message("to="))
        self._content.push(self._reader.release())
        return (yield from self._read_text(self._content, is_new=False))

    def _read_message(self, header: str) -> Reading[str]:
        """Reads a message: from the beginning of its header to the marker after its text."""
        table = self._table
        self._sink.may_reason = True
        header, is_header = yield from self._read_header(header)
        self._sink.may_reason = False
        if not is_header:
            self._content.push(self._reader.release())
            return (yield from self._read_text(self._content, is_new=False))
        self._reader.drop()
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix(table.functions) if recipient else ""
        if recipient and self._reads_calls and (name != recipient[1] or name in self._names):
            return (yield from self._read_call(name))
        channel = self._channel.search(header)
        if channel and channel[1] == table.reasoning_channel:
            return (yield from self._read_reasoning())
        return (yield from self._read_text(self._content))

    def _read_header(self, header: str) -> Reading[tuple[str, bool]]:
        """Reads and holds the rest of a header. Returns the whole, and whether it is one: it may be too long."""
        reader, table = self._reader, self._table
        reader.hold()
        while not header.endswith(table.message):
            symbol = yield from reader.peek()
            if not symbol or (reader.is_special and symbol in table.end):
                break
            if len(header) > MAX_HEADER_CHARS:
                return header, False
            header += reader.take()
        return header, True

    def _read_reasoning(self) -> Reading[str]:
        self._sink.is_reasoning = True
        marker = yield from self._read_text(self._reasons)
        self._sink.is_reasoning = not marker
        return marker

    def _read_text(self, target: _Joined, *, is_new: bool = True) -> Reading[str]:
        if is_new:
            target.begin()
        return (yield from self._until_marker(target.push))

    def _until_marker(self, emit: Callable[[str], None]) -> Reading[str]:
        marker = yield from self._reader.until(self._markers, emit)
        self._reader.drop()
        return marker

    def _read_call(self, name: str) -> Reading[str]:
        sink, has_any = self._sink, False

        def push(text: str) -> None:
            nonlocal has_any
            has_any = has_any or bool(text)
            sink.arguments(text)

        sink.start(name)
        marker = yield from self._until_marker(push)
        if marker or not self._reader.is_cut_off:
            sink.arguments("" if has_any else "{}")
            sink.end()
        return marker


class _Joined:
    """Joins the texts of messages with newlines."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._has_any = False
        self._is_new = False

    def begin(self) -> None:
        self._is_new = self._has_any

    def push(self, text: str) -> None:
        if text:
            self._emit("\n" + text if self._is_new else text)
            self._is_new, self._has_any = False, True


NO_CALLS = MarkedCalls(calls=())


class OutputParser:
    """Parses one output: `push` each token in order, then `finish` once."""

    def __init__(
        self,
        tool_call_format: ToolCallFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        *,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        reasoning_is_open: bool = False,
        shows_special_tokens: bool = False,
        free_functions: Collection[str] = (),
    ) -> None:
        """tool_call_format: None: calls are not parsed
        reasoning_format: None: the model does not reason
        schemas: JSON schema of the parameters, by function
        reasoning_is_open: the prompt ends inside reasoning
        shows_special_tokens: special tokens other than markers are content (skip_special_tokens is false)
        free_functions: whose arguments no grammar enforces: every tagged string of theirs is plain text; otherwise, a
        string that its schema narrows may be JSON, as grammars enforce it
        """
        self._reader = Reader(shows_special_tokens=shows_special_tokens)
        self._sink = Sink((schemas or {}).keys())
        reader, sink = self._reader, self._sink
        body = tool_call_format.body if tool_call_format else NO_CALLS
        messages = reasoning_format.messages if reasoning_format and not tool_call_format else None
        self._body: MarkedCallsReader | MessagesReader
        if isinstance(body, Messages):
            self._body = MessagesReader(reader, sink, body, reads_calls=True, names=(schemas or {}).keys())
        elif messages is not None:
            self._body = MessagesReader(reader, sink, messages, reads_calls=False, names=())
        else:
            self._body = MarkedCallsReader(reader, sink, body, reasoning_format, schemas or {}, free_functions)
        self._sink.is_reasoning = reasoning_is_open and reasoning_format is not None
        self._num_undecided_tokens = 0
        """Tokens in text that may become the marker or the header of reasoning."""
        self.num_reasoning_tokens = 0
        """Includes the tokens of the markers."""
        self._reading = self._read()
        next(self._reading)

    def push(self, token_id: int, text: str, is_special: bool) -> list[Event]:
        """token_id: negative for text that is no token of its own"""
        was_reasoning = self._sink.is_reasoning
        if text:
            self._reader.feed(text, is_special)
            next(self._reading)
        self._num_undecided_tokens += token_id >= 0
        events = self._sink.take()
        if not self._sink.may_reason:
            has_reasoned = any(isinstance(event, ReasoningDelta) for event in events)
            is_counted = was_reasoning or self._sink.is_reasoning or has_reasoned
            self.num_reasoning_tokens += self._num_undecided_tokens if is_counted else 0
            self._num_undecided_tokens = 0
        return events

    def finish(self, finish_reason: str) -> list[Event]:
        """Returns the held text as events. An incomplete call gets no end event."""
        self._reader.has_ended, self._reader.is_cut_off = True, finish_reason == "length"
        next(self._reading, None)
        return self._sink.take()

    def _read(self) -> Reading[None]:
        yield from self._body.read()
        while True:
            yield
