"""Streams of server-sent events that are made where their tokens arrive.

For: every endpoint that streams an answer. Does not know: what an event says, where it comes from. Invariants: what a
source has ready goes out in one write; while the client keeps up, that happens in the call that tells of it, and the
task of the request sleeps; what has to be awaited, a client that is behind, the end and errors are the task's. Both
ways send the same bytes. However a stream ends, `on_close` is called.

Not sse-starlette's EventSourceResponse, which ends open streams as soon as the server is told to stop (they must
drain), polls for that twice a second, and takes many times as long per event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import RETRY_AFTER_S
from .client_disconnect import unless_disconnected
from .direct_body import DirectBody
from .request_scope import PRESENCE, ClientPresence


class EventSource(Protocol):
    """The events of one answer, as they come about. Has one reader."""

    quiet_s: float | None
    """Seconds without an event after which `ping` is sent; None: never."""
    is_over: bool
    """Nothing follows."""
    needs_task: bool
    """What follows has to be awaited: `awaited`. Until then `ready` returns nothing."""

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called on the event loop when further events may be ready."""
        ...

    def ready(self) -> bytes:
        """The events that can be made at once, b"" for none. Never raises."""
        ...

    async def awaited(self) -> bytes:
        """The events that had to be awaited; its errors are the stream's."""
        ...

    def ping(self) -> bytes:
        """Says that the stream goes on, while nothing happens."""
        ...


class PieceReader:
    """Reads a source piece by piece. While it waits, what is ready goes to `direct`, if there is one and it is open."""

    def __init__(self, source: EventSource, direct: DirectBody | None = None) -> None:
        self._source = source
        self._direct = direct
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[bytes] | None = None
        """Gets what is made already."""
        self._is_lost = False
        self._alarm: asyncio.TimerHandle | None = None
        self._active_s = self._loop.time()
        """When the last piece was there."""
        source.listen(self._heard)
        if source.quiet_s is not None:
            self._set_alarm(source.quiet_s)

    async def next(self) -> bytes:
        """The next piece that was not written; the last one, which may be empty, when the source is over. Raises
        ClientDisconnect after `lost`."""
        if self._is_lost:
            raise ClientDisconnect
        source = self._source
        parts = [source.ready()]
        while True:
            while source.needs_task:
                parts += [await source.awaited(), source.ready()]
            if (piece := b"".join(parts)) or source.is_over:
                self._active_s = self._loop.time()
                return piece
            self._waiter = self._loop.create_future()
            try:
                parts = [await self._waiter]
            finally:
                self._waiter = None
            parts.append(source.ready())

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Every piece that was not written."""
        try:
            while not self._source.is_over:
                if piece := await self.next():
                    yield piece
        finally:
            self.close()

    def lost(self) -> None:
        """The client is gone."""
        self._is_lost = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ClientDisconnect())

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _heard(self) -> None:
        """Called for each token of a stream: everything else here is called seldom."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        direct = self._direct
        if direct is None or not direct.is_open:
            waiter.set_result(b"")
            return
        source = self._source
        piece = source.ready()
        if source.needs_task or source.is_over:
            waiter.set_result(piece)
        elif piece:
            direct.write(piece)
            self._active_s = self._loop.time()

    def _set_alarm(self, seconds: float) -> None:
        self._alarm = self._loop.call_later(seconds, self._look_for_quiet)

    def _look_for_quiet(self) -> None:
        assert self._source.quiet_s is not None
        left_s = self._active_s + self._source.quiet_s - self._loop.time()
        if left_s <= 0:
            left_s = self._source.quiet_s
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(self._source.ping())
        self._set_alarm(left_s)


class EventStream(Response):
    """A response with the events of `source` as its body. `on_close` is called once, when it is over."""

    def __init__(
        self, source: EventSource, on_close: Callable[[], None], headers: Mapping[str, str], status_code: int = 200
    ) -> None:
        self.status_code = status_code
        self.background = None
        retry = {"retry-after": RETRY_AFTER_S} if status_code == 503 else {}
        self._source = source
        self._on_close = on_close
        self.init_headers({**headers, **retry})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = PieceReader(self._source, DirectBody.of(scope))
        presence: ClientPresence | None = scope.get(PRESENCE)
        try:
            if presence is None:
                await unless_disconnected(Request(scope, receive), self._send(send, reader))
            else:
                presence.when_lost(reader.lost)
                await self._send(send, reader)
        except (ClientDisconnect, OSError):
            return
        finally:
            if presence is not None:
                presence.forget(reader.lost)
            reader.close()
            self._on_close()

    async def _send(self, send: Send, reader: PieceReader) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        source = self._source
        piece = await reader.next()
        while not source.is_over:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await reader.next()
        await send({"type": "http.response.body", "body": piece, "more_body": False})
