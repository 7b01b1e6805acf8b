"""Streams that a client can resume, how they move to another host, and their HTTP headers.

Used by generate_stream, streams under /v1 and ModelStreamInfer. Invariants: those of KeptAnswers; a client that resumes
a stream gets each event after its last one once, in order, or an error with the reason; an event is sent only after the
host with the copy has the data that it was made from; an event's id is the stream's name and the event's number.
Source: the WHATWG HTML standard, "Server-sent events" (`id:`, `Last-Event-ID`).
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument, unavailable

from ..access.request_identity import REQUEST_IDENTITY
from ..errors import log_bug
from ..http.errors import error_body, is_openai, openai_error_body
from ..http.event_stream import EventStream
from ..http.request_body import release_body
from ..http.request_scope import PRESENCE, ClientPresence, header
from .journal import RECORDING, EventsGoneError, Journal, Recording, StreamHead, StreamRecord, settle
from .kept_answers import KeptAnswer, KeptAnswers
from .response_store import current_owner
from .stream_copies import MAX_REQUEST_BYTES, StreamCopies

_PLACE: Final = re.compile(r"(?P<stream>[0-9a-f]{32})(:(?P<number>\d{1,9}))?")
MAX_STREAM_BYTES: Final = 4 << 20
"""Limit of the events of one stream, as for any other stream's client. A client further behind cannot resume."""


class StreamGoneError(TritonError):
    """The stream does not exist, or is no longer retained."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.NOT_FOUND)


@dataclass(eq=False, slots=True, kw_only=True)
class ResumableStream(KeptAnswer):
    """One resumable stream."""

    head: StreamHead
    headers: Mapping[str, str] = field(default_factory=dict)
    recording: Recording | None = None
    num_events: int = 0
    """Events made so far, including those that are not visible to readers yet."""
    producer: asyncio.Task[None] | None = None


class ResumableStreams:
    """The resumable streams of one server. Used only on its event loop."""

    def __init__(self, kept: KeptAnswers | None = None, copies: StreamCopies | None = None) -> None:
        """copies: None: streams end with this host"""
        self._kept = kept or KeptAnswers()
        self.copies = copies
        self._taking_over: dict[str, asyncio.Future[None]] = {}

    async def open(
        self,
        path: str,
        events: AsyncGenerator[Sequence[bytes], None],
        on_close: Callable[[], None],
        *,
        headers: Mapping[str, str] | None = None,
        recorded_headers: Sequence[tuple[bytes, bytes]] = (),
        recording: Recording | None = None,
    ) -> ResumableStream:
        """A stream of `events`, which are read with or without a client; `on_close` is called at their end.

        path: of requests that may resume it. recording: what the events are made from; it is copied, with
        `recorded_headers` of the request. Raises TritonError UNAVAILABLE when too much is held; the caller then closes
        the events.
        """
        if not self._kept.has_capacity():
            raise unavailable(self._kept.refusal("resumable streams"))
        head = _head(path, recorded_headers, recording)
        stream = ResumableStream(
            owner=head.owner,
            key=head.key,
            journal=Journal(MAX_STREAM_BYTES),
            request_bytes=len(head.request),
            head=head,
            headers=headers or {},
            recording=recording,
        )
        stream.stop = partial(self._stopped, stream)
        self._kept.add(stream)
        try:
            if recording is not None and self.copies is not None:
                record = StreamRecord(head, () if recording.known is None else recording.known.deltas)
                await self.copies.begin(record, partial(self._kept.forget, stream))
        except BaseException:
            self._kept.forget(stream)
            raise
        stream.producer = asyncio.get_running_loop().create_task(self._produce(stream, events, on_close))
        if recording is not None:
            recording.opened()
        return stream

    async def find(self, path: str, place: str, what: str) -> tuple[ResumableStream, int]:
        """Returns a stream, and the number of the last event that the client has (-1: none). place: the id of that
        event. what: the client's name for it, for errors.

        Raises TritonError INVALID_ARG, and StreamGoneError for a stream that has expired or belongs to another key.
        """
        found = _PLACE.fullmatch(place)
        if found is None:
            raise invalid_argument(f"{what} is '{place[:80]}', expected the id of an event")
        after = -1 if found["number"] is None else int(found["number"])
        stream = self._own(found["stream"]) or await self._taken_over(found["stream"], path, after)
        if stream is None or stream.head.path != path:
            raise StreamGoneError(f"there is no stream '{found['stream']}', or it is no longer available")
        if after + 1 < stream.journal.first_held:
            raise StreamGoneError(f"the events after '{place}' are no longer available")
        is_regenerated = stream.recording is not None and stream.head.epoch > 0
        if after >= stream.journal.next_number and (stream.journal.has_ended or not is_regenerated):
            raise invalid_argument(f"{what} is '{place}', but no such event was sent")
        return stream, after

    def leave(self) -> None:
        """Call before the server ends: ends streams that have copies, so that their clients resume on other hosts."""
        copies, self.copies = self.copies, None
        if copies is not None and copies.are_active:
            for stream in self._kept.all(ResumableStream):
                if stream.recording is not None:
                    self._kept.forget(stream)

    async def close(self) -> None:
        streams = list(self._kept.all(ResumableStream))
        producers = [stream.producer for stream in streams if stream.producer is not None]
        for stream in streams:
            self._kept.forget(stream)
        await asyncio.gather(*producers, return_exceptions=True)

    async def _taken_over(self, key: str, path: str, after: int) -> ResumableStream | None:
        """Another host's stream, regenerated here."""
        if self.copies is None:
            return None
        taking = self._taking_over.get(key)
        if taking is None:
            over = self._take_over_stream(self.copies, key, path, after)
            taking = self._taking_over[key] = asyncio.ensure_future(over)
            taking.add_done_callback(lambda _: self._taking_over.pop(key))
        await asyncio.shield(taking)
        return self._own(key)

    def _own(self, key: str) -> ResumableStream | None:
        return self._kept.find(ResumableStream, current_owner(), key)

    async def _take_over_stream(self, copies: StreamCopies, key: str, path: str, after: int) -> None:
        record = await copies.take(key, current_owner(), path, after)
        if record is None:
            return
        if (identity := REQUEST_IDENTITY.get()) is not None:
            REQUEST_IDENTITY.set(identity.continuing())  # for this task alone
        await copies.regenerate(record)

    def hand_over(self, key: str, owner: str, path: str) -> bool:
        """Ends a stream that another host continues. Returns whether this owner and path had it."""
        stream = self._kept.find(ResumableStream, owner, key)
        if stream is None or stream.head.path != path:
            return False
        self._kept.forget(stream)
        return True

    # --- one stream -------------------------------------------------------------------------------------------------

    async def _produce(
        self,
        stream: ResumableStream,
        events: AsyncGenerator[Sequence[bytes], None],
        on_close: Callable[[], None],
    ) -> None:
        try:
            async for some in events:
                stream.num_events += len(some)
                self._then(stream, partial(self._kept.publish, stream, some))
            self._then(stream, partial(self._kept.end, stream))
        except Exception as error:
            log_bug("unexpected error in a resumable stream", error)
            self._kept.end(stream, error)
        except asyncio.CancelledError:
            self._kept.end(stream)
            raise
        finally:
            on_close()
            await events.aclose()

    def _then(self, stream: ResumableStream, show: Callable[[], None]) -> None:
        """Calls `show` when the recording is copied."""
        if stream.recording is None or self.copies is None:
            show()
        else:
            self.copies.add(stream.key, stream.recording.take_new(), stream.num_events, show)

    def _stopped(self, stream: ResumableStream) -> None:
        """Called when the stream is forgotten."""
        if stream.producer is not None:
            stream.producer.cancel()
        if stream.recording is not None and self.copies is not None:
            self.copies.end(stream.key)


def _head(path: str, headers: Sequence[tuple[bytes, bytes]], recording: Recording | None) -> StreamHead:
    if recording is not None and recording.known is not None:
        head = recording.known.head
        return msgspec.structs.replace(head, epoch=head.epoch + 1)
    return StreamHead(
        key=uuid.uuid4().hex,
        owner=current_owner(),
        path=path,
        headers=tuple(headers),
        request=b"" if recording is None else recording.request,
        identity=b"" if recording is None else recording.identity,
    )


STREAM_ID: Final = "x-stream-id"
"""Response header: the start of the ids of the stream's events."""
_ASKED: Final = b"x-resumable-stream"
_LAST_EVENT_ID: Final = b"last-event-id"
_RECORDED_HEADERS: Final = frozenset((_ASKED, b"content-type", b"x-request-id", b"endpoint-load-metrics-format"))
"""Request headers that its answer depends on; never credentials. The recorded body is decompressed."""
_END_OF_EVENT: Final = b"\n\n"
_COMMENT: Final = b":"
_PING: Final = b": ping\n\n"
_QUIET_S: Final = 15.0
"""Silence after which a comment is sent to keep the connection open."""


def is_resumable(request: Request) -> bool:
    """Whether the client asks for a resumable stream. Raises TritonError for a value other than `true` and `false`."""
    asked = header(request, _ASKED).strip().lower()
    if asked not in ("", "true", "false"):
        raise invalid_argument(f"the header 'X-Resumable-Stream' is '{asked[:80]}', expected true or false")
    return asked == "true"


def last_event_id(request: Request) -> str:
    """ "" for a request that starts a stream."""
    return header(request, _LAST_EVENT_ID).strip()


def refuse_resuming(request: Request, instead: str = "") -> None:
    """For endpoints without resumable streams. instead: what the endpoint offers. Raises TritonError."""
    if is_resumable(request) or last_event_id(request):
        more = f"; {instead}" if instead else ""
        raise invalid_argument(f"a stream of {request.url.path} cannot be resumed with 'Last-Event-ID'{more}")


def begin_recording(streams: ResumableStreams, request: Request, body: bytes) -> Recording | None:
    """Starts to record a resumable stream that will be copied, before its inferences start; None for any other."""
    if streams.copies is None or len(body) > MAX_REQUEST_BYTES or not is_resumable(request):
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
    """chunks: each one whole events; see ResumableStreams.open."""
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


async def resume_stream(streams: ResumableStreams, request: Request, body: Awaitable[bytes]) -> Response:
    """The rest of a stream after the request's `Last-Event-ID`. body: read and dropped, since clients send it again.
    Raises TritonError as ResumableStreams.find."""
    await body
    release_body(request)
    found = await streams.find(request.url.path, last_event_id(request), "the header 'Last-Event-ID'")
    return _response(*found)


async def _events(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[Sequence[bytes], None]:
    try:
        async for chunk in chunks:
            yield [event for event in chunk.split(_END_OF_EVENT) if event and not event.startswith(_COMMENT)]
    finally:
        await chunks.aclose()


def _response(stream: ResumableStream, after: int) -> EventStream:
    return EventStream(_pieces(stream, after), {**stream.headers, STREAM_ID: stream.key})


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


async def regenerate(app: ASGIApp, record: StreamRecord) -> None:
    """Returns once the stream is open. Raises TritonError UNAVAILABLE if the request is refused."""
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
    """The body of a request whose client never disconnects."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body or b"", None
        return {"type": "http.request", "body": body, "more_body": False}


class _Refusal:
    """The application's answer if it is not a stream."""

    def __init__(self) -> None:
        self._status = 0
        self._body = b""

    @property
    def text(self) -> str:
        return f"{self._status} {self._body[:_SHOWN_BYTES].decode('utf-8', 'replace')}"

    async def send(self, message: Message) -> None:
        self._status = message.get("status", self._status)
        self._body += message.get("body", b"")[:_SHOWN_BYTES]
