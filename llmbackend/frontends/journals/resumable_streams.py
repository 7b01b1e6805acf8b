"""Streams that a client can come back to: their journals, who may read them, how long they are kept.

For: the streams of server-sent events (resumable_http.py), and requests of ModelStreamInfer. Does not know: what an
event says, how it is sent. Invariants: a stream that did not ask to be resumable costs nothing here; one that did goes
on without its client for the grace, then its generation is cancelled; a client that comes back gets each event behind
the last one that it has once, in order, or an error that says why it cannot; an event is shown once the hosts that
copy the stream have what it was made of; what streams hold is bounded, one by one and together.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import msgspec

from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument, unavailable
from llmbackend.frontends.errors import log_bug

from .journal import Journal, Recording, StreamDelta, StreamHead, StreamRecord
from .response_store import current_owner

_PLACE: Final = re.compile(r"(?P<stream>[0-9a-f]{32})(:(?P<number>\d{1,9}))?")
MAX_STREAM_BYTES: Final = 4 << 20
"""Events of one stream; a client that is further behind than that cannot come back. As much as may wait for a client of
another stream."""
_MAX_BYTES: Final = 256 << 20
"""Events of all streams. Those that have ended go before the end of their grace; then no new one is opened."""


class StreamGoneError(TritonError):
    """There is no such stream, or not any more."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.NOT_FOUND)


class Copies(Protocol):
    """Copies of records on other hosts."""

    @property
    def are_made(self) -> bool:
        """Whether another host has them."""

    def begin(self, record: StreamRecord, superseded: Callable[[], None]) -> asyncio.Future[None]:
        """A new stream, or one that is made again, with the deltas that are known of it and will be added again; done
        when it is copied, or cannot be. superseded: called when another host has taken it up."""

    def add(self, key: str, deltas: Sequence[StreamDelta], then: Callable[[], None]) -> None:
        """More of a stream. `then` is called when it is copied, or cannot be; in the order of the calls."""

    def end(self, key: str) -> None:
        """Nobody can come back to it any more."""

    async def take(self, key: str, owner: str, path: str) -> StreamRecord | None:
        """The record of a stream that another host began, which is this host's from now on; None where no host has it
        for this owner and path. Raises TritonError UNAVAILABLE where a host that may have it can not be asked."""

    async def make_again(self, record: StreamRecord) -> None:
        """Has the stream's endpoint make it again, under the next epoch; returns when it is opened here. Raises
        TritonError."""


@dataclass(eq=False, slots=True)
class ResumableStream:
    """One resumable stream, while it may be asked for."""

    head: StreamHead
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    journal: Journal = field(default_factory=lambda: Journal(MAX_STREAM_BYTES))
    recording: Recording | None = None
    producer: asyncio.Task[None] | None = None
    grace: asyncio.TimerHandle | None = None

    @property
    def key(self) -> str:
        return self.head.key


class ResumableStreams:
    """The resumable streams of one server. Used on its event loop alone."""

    def __init__(self, grace_s: float = 30.0, copies: Copies | None = None) -> None:
        """copies: None: streams end with this host."""
        self._grace_s = grace_s
        self.copies = copies
        self._streams: OrderedDict[str, ResumableStream] = OrderedDict()
        self._held_bytes = 0
        self._taking_up: dict[str, asyncio.Future[None]] = {}

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    async def open(
        self,
        path: str,
        events: AsyncGenerator[Sequence[bytes], None],
        on_close: Callable[[], None],
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        recorded_headers: Sequence[tuple[bytes, bytes]] = (),
        recording: Recording | None = None,
    ) -> ResumableStream:
        """A stream of `events`, which from now on are read whether there is a client or not; `on_close` is called when
        they have ended.

        path: of requests that may come back. recording: of all that the events are made of; with `recorded_headers`,
        those of the request, it is copied. Raises TritonError UNAVAILABLE when too much is held; then the caller closes
        the events.
        """
        self._make_room()
        head = _head(path, recorded_headers, recording)
        stream = ResumableStream(head, status, headers or {}, recording=recording)
        self._streams[head.key] = stream
        stream.journal.on_readers = lambda count: self._readers_changed(stream, count)
        self._readers_changed(stream, 0)
        try:
            if recording is not None and self.copies is not None:
                record = StreamRecord(head, () if recording.known is None else recording.known.deltas)
                await self.copies.begin(record, partial(self._forget, stream))
        except BaseException:
            self._forget(stream)
            raise
        stream.producer = asyncio.get_running_loop().create_task(self._produce(stream, events, on_close))
        if recording is not None:
            recording.opened()
        return stream

    async def find(self, path: str, place: str, what: str) -> tuple[ResumableStream, int]:
        """A stream, and the number of the last event that the client has (-1: none), named by the id of that event.
        what: by which the client named it, for errors.

        Raises TritonError INVALID_ARG, and StreamGoneError for a stream that has ended, is another key's or was lost
        with the server.
        """
        found = _PLACE.fullmatch(place)
        if found is None:
            raise invalid_argument(f"{what} is '{place[:80]}', expected the id of an event")
        stream = self._streams.get(found["stream"]) or await self._taken_up(found["stream"], path)
        if stream is None or stream.head.owner != current_owner() or stream.head.path != path:
            raise StreamGoneError(f"there is no stream '{found['stream']}', or it is no longer kept")
        after = -1 if found["number"] is None else int(found["number"])
        if after + 1 < stream.journal.first_held:
            raise StreamGoneError(f"the events after '{place}' are no longer kept")
        is_made_again = stream.recording is not None and stream.head.epoch > 0
        if after >= stream.journal.next_number and (stream.journal.has_ended or not is_made_again):
            raise invalid_argument(f"{what} is '{place}', but no such event was sent")
        return stream, after

    def leave(self) -> None:
        """Before the server ends: streams that other hosts have copies of end here, and go on where their clients come
        back to."""
        copies, self.copies = self.copies, None
        if copies is not None and copies.are_made:
            for stream in list(self._streams.values()):
                if stream.recording is not None:
                    self._forget(stream)

    async def close(self) -> None:
        """Ends all of them."""
        producers = [stream.producer for stream in self._streams.values() if stream.producer is not None]
        for stream in list(self._streams.values()):
            self._forget(stream)
        await asyncio.gather(*producers, return_exceptions=True)

    async def _taken_up(self, key: str, path: str) -> ResumableStream | None:
        """The stream that another host began, made again here."""
        if self.copies is None:
            return None
        taking = self._taking_up.get(key)
        if taking is None:
            taking = self._taking_up[key] = asyncio.ensure_future(self._take_up(self.copies, key, path))
            taking.add_done_callback(lambda _: self._taking_up.pop(key))
        await asyncio.shield(taking)
        return self._streams.get(key)

    async def _take_up(self, copies: Copies, key: str, path: str) -> None:
        record = await copies.take(key, current_owner(), path)
        if record is not None:
            await copies.make_again(record)

    def give_away(self, key: str, owner: str, path: str) -> bool:
        """Ends a stream that another host goes on with; whether there was one for this owner and path."""
        stream = self._streams.get(key)
        if stream is None or (stream.head.owner, stream.head.path) != (owner, path):
            return False
        self._forget(stream)
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
                self._then(stream, partial(self._show, stream, some))
            self._then(stream, stream.journal.end)
        except Exception as error:
            log_bug("unexpected error in a resumable stream", error)
            stream.journal.end(error)
        except asyncio.CancelledError:
            stream.journal.end()
            raise
        finally:
            on_close()
            await events.aclose()

    def _then(self, stream: ResumableStream, show: Callable[[], None]) -> None:
        """Calls `show` when all that was recorded is copied."""
        if stream.recording is None or self.copies is None:
            show()
        else:
            self.copies.add(stream.key, stream.recording.take_new(), show)

    def _show(self, stream: ResumableStream, events: Sequence[bytes]) -> None:
        before = stream.journal.held_bytes
        stream.journal.publish(events)
        if stream.key in self._streams:
            self._held_bytes += stream.journal.held_bytes - before

    def _readers_changed(self, stream: ResumableStream, count: int) -> None:
        if stream.grace is not None:
            stream.grace.cancel()
            stream.grace = None
        if not count and stream.key in self._streams:
            stream.grace = asyncio.get_running_loop().call_later(self._grace_s, self._forget, stream)

    def _forget(self, stream: ResumableStream) -> None:
        """Ends it, if it has not ended."""
        if self._streams.pop(stream.key, None) is None:
            return
        self._held_bytes -= stream.journal.held_bytes
        if stream.grace is not None:
            stream.grace.cancel()
        if stream.producer is not None:
            stream.producer.cancel()
        if stream.recording is not None and self.copies is not None:
            self.copies.end(stream.key)

    def _make_room(self) -> None:
        if self._held_bytes <= _MAX_BYTES:
            return
        for stream in list(self._streams.values()):
            if stream.journal.has_ended and not stream.journal.num_readers:
                self._forget(stream)
        if self._held_bytes > _MAX_BYTES:
            raise unavailable(f"resumable streams hold {self._held_bytes} bytes of events, the limit is {_MAX_BYTES}")


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
