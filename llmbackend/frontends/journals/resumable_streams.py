"""Streams of server-sent events that a client can come back to: `X-Resumable-Stream: true`, then `Last-Event-ID`.

For: generate_stream, and the streams under /v1. Does not know: what an event says, except for its end. Invariants: a
stream that did not ask to be resumable costs nothing here; one that did goes on without its client for the grace, then
its generation is cancelled; a client that comes back gets each event behind its `Last-Event-ID` once, in order, or an
error that says why it cannot; what streams hold is bounded, one by one and together.
Source: the WHATWG HTML standard, "Server-sent events" (`id:`, `Last-Event-ID`).
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument, unavailable
from llmbackend.frontends.errors import log_bug
from llmbackend.frontends.http.errors import error_body, is_openai, openai_error_body
from llmbackend.frontends.http.request_scope import header

from .journal import EventsGoneError, Journal
from .response_store import current_owner

STREAM_ID: Final = "x-stream-id"
"""Header of the response: what the ids of its events begin with."""
_ASKED: Final = b"x-resumable-stream"
_LAST_EVENT_ID: Final = b"last-event-id"
_ID: Final = re.compile(r"(?P<stream>[0-9a-f]{32})(:(?P<number>\d{1,9}))?")
_END_OF_EVENT: Final = b"\n\n"
_COMMENT: Final = b":"
_PING: Final = b": ping\n\n"
_QUIET_S: Final = 15.0
"""Without an event; then a comment goes out, so that proxies keep the connection."""
_MAX_STREAM_BYTES: Final = 4 << 20
"""Events of one stream; a client that is further behind than that cannot come back. As much as may wait for a client of
another stream."""
_MAX_BYTES: Final = 256 << 20
"""Events of all streams. Those that have ended go before the end of their grace; then no new one is opened."""


class StreamGoneError(TritonError):
    """There is no such stream, or not any more."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.NOT_FOUND)


def is_resumable(request: Request) -> bool:
    """Whether the client wants to be able to come back. Raises TritonError for a header that is not `true` or
    `false`."""
    asked = header(request, _ASKED).strip().lower()
    if asked not in ("", "true", "false"):
        raise invalid_argument(f"the header 'X-Resumable-Stream' is '{asked[:80]}', expected true or false")
    return asked == "true"


def last_event_id(request: Request) -> str:
    """ "" for a request that begins a stream."""
    return header(request, _LAST_EVENT_ID).strip()


def refuse_resuming(request: Request, instead: str = "") -> None:
    """Of an endpoint whose streams are not resumable. Raises TritonError for a request that asks for it. instead: what
    the endpoint has"""
    if is_resumable(request) or last_event_id(request):
        more = f"; {instead}" if instead else ""
        raise invalid_argument(f"a stream of {request.url.path} can not be come back to by 'Last-Event-ID'{more}")


@dataclass(eq=False, slots=True)
class _Stream:
    """One resumable stream, while it may be asked for."""

    key: str
    owner: str
    path: str
    """Of the request that began it: its events have the form of that endpoint."""
    status: int
    headers: Mapping[str, str]
    journal: Journal = field(default_factory=lambda: Journal(_MAX_STREAM_BYTES))
    producer: asyncio.Task[None] | None = None
    grace: asyncio.TimerHandle | None = None


class ResumableStreams:
    """The resumable streams of one server. Used on its event loop alone."""

    def __init__(self, grace_s: float = 30.0) -> None:
        self._grace_s = grace_s
        self._streams: OrderedDict[str, _Stream] = OrderedDict()
        self._held_bytes = 0

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def open(
        self,
        request: Request,
        chunks: AsyncGenerator[bytes, None],
        on_close: Callable[[], None],
        headers: Mapping[str, str],
        status: int = 200,
    ) -> Response:
        """The response that sends `chunks`, whole events each, and from now on reads them whether its client is there
        or not; `on_close` is called when they have ended. Raises TritonError UNAVAILABLE when too much is held; then
        the caller closes them."""
        self._make_room()
        key = uuid.uuid4().hex
        stream = _Stream(key, current_owner(), request.url.path, status, {**headers, STREAM_ID: key})
        self._streams[key] = stream
        stream.journal.on_readers = lambda count: self._readers_changed(stream, count)
        self._readers_changed(stream, 0)
        stream.producer = asyncio.get_running_loop().create_task(self._produce(stream, chunks, on_close))
        return _StreamResponse(stream, -1)

    def come_back(self, request: Request) -> Response:
        """The rest of a stream, behind the request's `Last-Event-ID`. Raises TritonError INVALID_ARG, and
        StreamGoneError for a stream that has ended, is another key's or was lost with the server."""
        text = last_event_id(request)
        found = _ID.fullmatch(text)
        if found is None:
            raise invalid_argument(f"the header 'Last-Event-ID' is '{text[:80]}', expected the id of an event")
        stream = self._streams.get(found["stream"])
        if stream is None or stream.owner != current_owner() or stream.path != request.url.path:
            raise StreamGoneError(f"there is no stream '{found['stream']}' here, or not any more")
        after = -1 if found["number"] is None else int(found["number"])
        if after + 1 < stream.journal.first_held:
            raise StreamGoneError(f"the events behind '{text}' are no longer held")
        if after >= stream.journal.next_number:
            raise invalid_argument(f"the header 'Last-Event-ID' is '{text}', but no such event was sent")
        return _StreamResponse(stream, after)

    async def close(self) -> None:
        """Ends all of them."""
        producers = [stream.producer for stream in self._streams.values() if stream.producer is not None]
        for stream in list(self._streams.values()):
            self._forget(stream)
        await asyncio.gather(*producers, return_exceptions=True)

    # --- one stream -------------------------------------------------------------------------------------------------

    async def _produce(
        self, stream: _Stream, chunks: AsyncGenerator[bytes, None], on_close: Callable[[], None]
    ) -> None:
        try:
            async for chunk in chunks:
                self._publish(stream, chunk)
            stream.journal.end()
        except Exception as error:
            log_bug("unexpected error in a resumable stream", error)
            stream.journal.end(error)
        finally:
            stream.journal.end()
            on_close()
            await chunks.aclose()

    def _publish(self, stream: _Stream, chunk: bytes) -> None:
        before = stream.journal.held_bytes
        events = [event for event in chunk.split(_END_OF_EVENT) if event and not event.startswith(_COMMENT)]
        stream.journal.publish(events)
        if stream.key in self._streams:
            self._held_bytes += stream.journal.held_bytes - before

    def _readers_changed(self, stream: _Stream, count: int) -> None:
        if stream.grace is not None:
            stream.grace.cancel()
            stream.grace = None
        if not count and stream.key in self._streams:
            stream.grace = asyncio.get_running_loop().call_later(self._grace_s, self._forget, stream)

    def _forget(self, stream: _Stream) -> None:
        """Ends it, if it has not ended."""
        if self._streams.pop(stream.key, None) is None:
            return
        self._held_bytes -= stream.journal.held_bytes
        if stream.grace is not None:
            stream.grace.cancel()
        if stream.producer is not None:
            stream.producer.cancel()

    def _make_room(self) -> None:
        if self._held_bytes <= _MAX_BYTES:
            return
        for stream in list(self._streams.values()):
            if stream.journal.has_ended and not stream.journal.num_readers:
                self._forget(stream)
        if self._held_bytes > _MAX_BYTES:
            raise unavailable(f"resumable streams hold {self._held_bytes} bytes of events, at most {_MAX_BYTES} may be")


class _StreamResponse(Response):
    """One connection's view of a stream."""

    def __init__(self, stream: _Stream, after: int) -> None:
        self.status_code = stream.status
        self.background = None
        self._stream = stream
        self._after = after
        self.init_headers(stream.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        watching = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((sending, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, watching):
                task.cancel()
            ended = await asyncio.gather(sending, watching, return_exceptions=True)
        if isinstance(ended[0], Exception) and not isinstance(ended[0], OSError):
            raise ended[0]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        key = self._stream.key.encode()
        reading = self._stream.journal.follow(self._after, _QUIET_S)
        try:
            async for events in reading:
                parts = [
                    b"id: %b:%d\n%b\n\n" % (key, number, event)
                    for number, event in enumerate(events.parts, events.first)
                ]
                await send({"type": "http.response.body", "body": b"".join(parts) or _PING, "more_body": True})
        except EventsGoneError:
            await send({"type": "http.response.body", "body": self._too_slow(), "more_body": True})
        finally:
            await reading.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _too_slow(self) -> bytes:
        message = f"the client reads too slowly: more than {_MAX_STREAM_BYTES} bytes were waiting for it"
        if is_openai(self._stream.path):
            return b"data: %b\n\n" % openai_error_body(message, "invalid_request_error", "request_cancelled")
        return b"data: %b\n\n" % error_body(message)


async def _disconnect(receive: Receive) -> None:
    with suppress(OSError):
        while (await receive())["type"] != "http.disconnect":
            pass
