"""The events of a streamed response in OpenAI's order, with sequence numbers; and streams of stored events.

Invariants: an event is a function of the request, the identity and the deltas so far; the last one contains the whole
response; a client gets each event once, in order. The constant parts of an item's events are encoded once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Final

import orjson

from ...generation.http_answers import stream_headers
from ...generation.tensors import Delta
from ...http.errors import JsonObject, OpenAIError
from ...http.event_stream import EventStream
from ...journals.documents import StoreError
from ...journals.journal import EventsGoneError, Journal
from ..chunks import PING
from .output_items import MESSAGE, OutputItem
from .response_state import Change, ItemAdded, ResponseState, TextAdded, by_token

_QUIET_S: Final = 15.0
"""Silence after which a stream of stored events sends a ping to keep the connection open."""


class ResponseWriter:
    """Writes the events of one response: `begin`, then `delta` for each delta, then `end` or `fail`. The methods named
    `…_events` return the same as lists of events."""

    def __init__(self, state: ResponseState, *, cuts_at_tokens: bool = False) -> None:
        """cuts_at_tokens: each token becomes an event of its own, so that events do not depend on how tokens are
        batched; requires deltas with text tokens"""
        self._state = state
        self._cuts_at_tokens = cuts_at_tokens
        self._next_number = 0
        self._end_number: int | None = None
        self._delta_head = self._delta_middle = self._delta_tail = b""
        """Parts of the open item's text events; the number and the text go between them."""

    @property
    def next_sequence_number(self) -> int:
        return self._next_number

    def begin(self) -> bytes:
        return b"".join(self.begin_events())

    def begin_choice(self, index: int, first: Delta) -> bytes:
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        return b"".join(self.delta_events(delta))

    def end(self) -> bytes:
        return b"".join(self.end_events())

    def begin_events(self) -> list[bytes]:
        events = [self._of_response("response.created")]
        if self._state.status == "queued":
            events.append(self._of_response("response.queued"))
            self._state.status = "in_progress"
        events.append(self._of_response("response.in_progress"))
        return events

    def delta_events(self, delta: Delta) -> list[bytes]:
        deltas: Iterable[Delta] = by_token(delta) if self._cuts_at_tokens else (delta,)
        return [event for part in deltas for one in self._state.add(part) for event in self._as_events(one)]

    def ping(self) -> bytes:
        return PING

    def fail(self, error: OpenAIError) -> bytes:
        return b"".join(self.fail_events(error))

    def end_events(self) -> list[bytes]:
        self._end_number = self._next_number
        self._state.end()
        return [self._of_response(f"response.{self._state.status}")]

    def fail_events(self, error: OpenAIError) -> list[bytes]:
        if self._end_number is not None:
            self._next_number = self._end_number  # replaces the end, which was not sent
        self._end_number = self._next_number
        self._state.fail(error)
        told = {"code": error.code or error.kind, "message": error.message, "param": error.param}
        return [self._event("error", told), self._of_response("response.failed")]

    def _of_response(self, kind: str) -> bytes:
        return self._numbered(kind, b'"response":' + self._state.json())

    def _as_events(self, change: Change) -> list[bytes]:
        if type(change) is TextAdded:
            return [self._text_added(change)] if change.item.kind.delta_event else []
        if type(change) is ItemAdded:
            return self._item_added(change.item)
        return self._item_done(change.item)

    def _text_added(self, change: TextAdded) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        text = orjson.dumps(change.text)
        if change.logprobs:
            text += b',"logprobs":[%b]}\n\n' % change.logprobs
            return b"%b%d%b%b" % (self._delta_head, number, self._delta_middle, text)
        return b"%b%d%b%b%b" % (self._delta_head, number, self._delta_middle, text, self._delta_tail)

    def _item_added(self, item: OutputItem) -> list[bytes]:
        kind = item.kind
        place = _place(item)
        self._delta_head = _head(kind.delta_event)
        self._delta_middle = b"," + orjson.dumps(place)[1:-1] + b',"delta":'
        self._delta_tail = b',"logprobs":[]}\n\n' if kind is MESSAGE else b"}\n\n"
        added = self._event("response.output_item.added", {"output_index": item.index, "item": item.as_added()})
        if not kind.part_type:
            return [added]
        return [added, self._event("response.content_part.added", place | {"part": item.empty_part()})]

    def _item_done(self, item: OutputItem) -> list[bytes]:
        kind, place = item.kind, _place(item)
        done = place | {kind.text_field: item.text} | _logprobs(item)
        more = {"name": item.tool.name} if item.tool is not None and item.tool.kind == "function" else {}
        events = [self._event(kind.done_event, done | more)] if kind.done_event else []
        if kind.part_type:
            events.append(self._event("response.content_part.done", place | {"part": item.part()}))
        item_done = {"output_index": item.index, "item": item.as_json()}
        events.append(self._event("response.output_item.done", item_done))
        return events

    def _event(self, kind: str, fields: JsonObject) -> bytes:
        return self._numbered(kind, orjson.dumps(fields)[1:-1])

    def _numbered(self, kind: str, fields: bytes) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        return b"%b%d,%b}\n\n" % (_head(kind), number, fields)


def _head(kind: str) -> bytes:
    """An event up to its number."""
    return b'event: %b\ndata: {"type":"%b","sequence_number":' % (kind.encode(), kind.encode())


def _place(item: OutputItem) -> JsonObject:
    place: JsonObject = {"item_id": item.id, "output_index": item.index}
    return place | {"content_index": 0} if item.kind.part_type else place


def _logprobs(item: OutputItem) -> JsonObject:
    return {"logprobs": item.logprobs_json} if item.kind is MESSAGE else {}


def journal_stream(journal: Journal, after: int = -1, headers: Mapping[str, str] | None = None) -> EventStream:
    """The events after number `after`."""
    return EventStream(_events_of(journal, after), stream_headers(headers or {}))


async def _events_of(journal: Journal, after: int) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(journal.follow(after, _QUIET_S)) as following:
            async for events in following:
                yield b"".join(events.parts) or PING
    except EventsGoneError as error:
        yield OpenAIError(str(error), status=503, kind="server_error", code="events_lost").event()
    except StoreError as error:
        yield OpenAIError.of(error).event()
