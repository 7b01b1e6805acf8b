"""Streams of server-sent events that a client can come back to: `X-Resumable-Stream: true`, then `Last-Event-ID`.

For: generate_stream, and the streams under /v1. Does not know: what an event says, except for its end. Invariants: as
of ResumableStreams; the id of an event is the stream's name and the event's number.
Source: the WHATWG HTML standard, "Server-sent events" (`id:`, `Last-Event-ID`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from llmbackend.core.errors import invalid_argument, unavailable

from ..http.errors import error_body, is_openai, openai_error_body
from ..http.event_stream import EventStream
from ..http.request_scope import PRESENCE, ClientPresence, header
from .journal import RECORDING, EventsGoneError, Recording, StreamRecord, settle
from .resumable_streams import MAX_STREAM_BYTES, ResumableStream, ResumableStreams

STREAM_ID: Final = "x-stream-id"
"""Header of the response: what the ids of its events begin with."""
_ASKED: Final = b"x-resumable-stream"
_LAST_EVENT_ID: Final = b"last-event-id"
_RECORDED_HEADERS: Final = frozenset(
    (_ASKED, b"content-type", b"content-encoding", b"x-request-id", b"endpoint-load-metrics-format")
)
"""Of a request, those by which its answer differs; never one that authorises its client."""
_END_OF_EVENT: Final = b"\n\n"
_COMMENT: Final = b":"
_PING: Final = b": ping\n\n"
_QUIET_S: Final = 15.0
"""Without an event; then a comment goes out, so that proxies keep the connection."""


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
        raise invalid_argument(f"a stream of {request.url.path} cannot be resumed with 'Last-Event-ID'{more}")


def begin_recording(streams: ResumableStreams, request: Request, body: bytes) -> Recording | None:
    """The recording of the stream that the request asks for; None where it asks for none, or where there are no copies.
    To be called before its inferences begin."""
    if streams.copies is None or not is_resumable(request):
        return None
    recording = Recording.of(request)
    if recording is None:
        recording = request.scope[RECORDING] = Recording()
        recording.request = body
    return recording


async def open_stream(
    streams: ResumableStreams,
    request: Request,
    chunks: AsyncGenerator[bytes, None],
    on_close: Callable[[], None],
    headers: Mapping[str, str],
) -> Response:
    """The response that sends `chunks`, whole events each; see ResumableStreams.open."""
    headers_recorded = [(name, value) for name, value in request.scope["headers"] if name in _RECORDED_HEADERS]
    stream = await streams.open(
        request.url.path,
        _events(chunks),
        on_close,
        headers=headers,
        recorded_headers=headers_recorded,
        recording=Recording.of(request),
    )
    return _response(stream, -1)


async def come_back(streams: ResumableStreams, request: Request) -> Response:
    """The rest of a stream, behind the request's `Last-Event-ID`. Raises TritonError as ResumableStreams.find does."""
    found = await streams.find(request.url.path, last_event_id(request), "the header 'Last-Event-ID'")
    return _response(*found)


async def _events(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[Sequence[bytes], None]:
    try:
        async for chunk in chunks:
            yield [event for event in chunk.split(_END_OF_EVENT) if event and not event.startswith(_COMMENT)]
    finally:
        await chunks.aclose()


def _response(stream: ResumableStream, after: int) -> EventStream:
    """One connection's view of a stream."""
    return EventStream(_pieces(stream, after), {**stream.headers, STREAM_ID: stream.key}, stream.status)


async def _pieces(stream: ResumableStream, after: int) -> AsyncGenerator[bytes, None]:
    key = stream.key.encode()
    try:
        async with aclosing(stream.journal.follow(after, _QUIET_S)) as reading:
            async for events in reading:
                numbered = enumerate(events.parts, events.first)
                yield b"".join([b"id: %b:%d\n%b\n\n" % (key, number, event) for number, event in numbered]) or _PING
    except EventsGoneError:
        yield _too_slow(stream.head.path)


def _too_slow(path: str) -> bytes:
    message = f"the client reads too slowly: more than {MAX_STREAM_BYTES} bytes were waiting for it"
    if is_openai(path):
        return b"data: %b\n\n" % openai_error_body(message, "invalid_request_error", "request_cancelled")
    return b"data: %b\n\n" % error_body(message)


_SHOWN_BYTES = 400


async def make_again(app: ASGIApp, record: StreamRecord) -> None:
    """Returns when the stream is opened. Raises TritonError UNAVAILABLE when the request is refused here."""
    recording = Recording(record)
    opened = asyncio.get_running_loop().create_future()
    recording.opened = partial(settle, opened)
    refusal = _Refusal()
    serving = asyncio.ensure_future(app(_scope(recording), _Body(record.head.request).receive, refusal.send))
    try:
        await asyncio.wait((serving, opened), return_when=asyncio.FIRST_COMPLETED)
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await serving
    if not opened.done():
        raise unavailable(f"the stream cannot be regenerated here: {refusal.text}")


def _scope(recording: Recording) -> dict[str, Any]:
    assert recording.known is not None
    head = recording.known.head
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": head.path,
        "raw_path": head.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(head.headers),
        "client": None,
        "server": None,
        PRESENCE: ClientPresence(),
        RECORDING: recording,
    }


class _Body:
    """The body of a request whose client stays."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body or b"", None
        return {"type": "http.request", "body": body, "more_body": False}


class _Refusal:
    """What the application answers in place of a stream."""

    def __init__(self) -> None:
        self._status = 0
        self._body = b""

    @property
    def text(self) -> str:
        return f"{self._status} {self._body[:_SHOWN_BYTES].decode('utf-8', 'replace')}"

    async def send(self, message: Message) -> None:
        self._status = message.get("status", self._status)
        self._body += message.get("body", b"")[:_SHOWN_BYTES]
