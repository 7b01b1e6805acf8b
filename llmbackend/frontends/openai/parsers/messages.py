"""Reads outputs that consist of messages, each with a header: OpenAI's harmony.

For: the output parser. Does not know: formats. Invariant: text without a header is content; two messages of one kind
are kept apart by a newline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from .events import Sink
from .json_calls import MAX_HEADER_CHARS
from .reader import Reader, Reading, markers
from .tables import Messages

_RECIPIENT = re.compile(r"\bto=([^\s<]{1,256})")


class MessagesReader:
    """Owner: its OutputParser."""

    def __init__(
        self, reader: Reader, sink: Sink, table: Messages, *, reads_calls: bool, names: Collection[str]
    ) -> None:
        """reads_calls: whether messages to functions are calls, or else content
        names: the request's functions, to which a message may go without saying that they are functions
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
        """All of the output."""
        marker = yield from self._read_first()
        while marker:
            if marker in self._header_begins:
                marker = yield from self._read_message(marker)
            else:
                marker = yield from self._read_text(self._content)

    def _read_first(self) -> Reading[str]:
        """What continues the message that the prompt has begun, up to the next marker."""
        if self._sink.is_reasoning:
            return (yield from self._read_reasoning())
        self._reader.hold()
        if (yield from self._reader.one_of((" to=", "to="))):
            return (yield from self._read_message("to="))
        self._content.push(self._reader.release())
        return (yield from self._read_text(self._content, is_new=False))

    def _read_message(self, header: str) -> Reading[str]:
        """From the beginning of its header to the marker behind its text."""
        reader, table = self._reader, self._table
        reader.hold()
        while not header.endswith(table.message):
            symbol = yield from reader.peek()
            if not symbol or (reader.is_special and symbol in table.end):
                break
            if len(header) > MAX_HEADER_CHARS:  # no header
                self._content.push(reader.release())
                return (yield from self._read_text(self._content, is_new=False))
            header += reader.take()
        reader.drop()
        recipient = _RECIPIENT.search(header)
        name = recipient[1].removeprefix(table.functions) if recipient else ""
        if recipient and self._reads_calls and (name != recipient[1] or name in self._names):
            return (yield from self._read_call(name))
        channel = self._channel.search(header)
        if channel and channel[1] == table.reasoning_channel:
            return (yield from self._read_reasoning())
        return (yield from self._read_text(self._content))

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
    """The texts of several messages, with a newline between them."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._has_any = False
        self._is_new = False

    def begin(self) -> None:
        """A further message begins."""
        self._is_new = self._has_any

    def push(self, text: str) -> None:
        if text:
            self._emit("\n" + text if self._is_new else text)
            self._is_new, self._has_any = False, True
