"""Server-sent event streams: `pieces_of` reads a source in pieces of whole events, `EventStream` sends them.

Independent of what an event says and where it comes from. Invariants: all ready events are sent in one piece. While the
client keeps up, the piece is written by the call that announces its tokens, and the request's task sleeps; the task
awaits what must be awaited, and handles slow clients, the end and errors. Both paths send the same bytes. `on_close` is
called in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Protocol

from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..errors import RETRY_AFTER_S
from .direct_body import DirectBody
from .request_scope import PRESENCE, ClientPresence


class EventSource(Protocol):
    """The events of one answer, for one reader."""

    quiet_s: float | None
    """Silence after which a `ping` is sent; None: never."""
    is_over: bool
    needs_task: bool
    """The next events require `awaited`; until then `ready` returns none."""

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called on the event loop when further events may be ready."""

    def ready(self) -> bytes:
        """The events that are ready without awaiting, b"" for none. Never raises."""

    async def awaited(self) -> bytes:
        """Waits for the next events. Raises the errors of the stream."""

    def ping(self) -> bytes:
        """A comment that shows that the stream is alive."""


def pieces_of(source: EventSource, direct: DirectBody | None = None) -> AsyncGenerator[bytes, None]:
    """The events of `source` in pieces, except those written to `direct` while it is open and the generator waits."""
    return _PieceReader(source, direct).pieces()


class _PieceReader:
    def __init__(self, source: EventSource, direct: DirectBody | None) -> None:
        self._source = source
        self._direct = direct
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[bytes] | None = None
        """Set while the generator waits. Its result is a piece."""
        self._alarm: asyncio.TimerHandle | None = None
        self._active_s = 0.0
        """When the last piece was created."""

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        source = self._source
        source.listen(self._on_ready)
        self._active_s = self._loop.time()
        if source.quiet_s is not None:
            self._set_alarm(source.quiet_s)
        try:
            while not source.is_over:
                if piece := await self._next():
                    yield piece
        finally:
            if self._alarm is not None:
                self._alarm.cancel()

    async def _next(self) -> bytes:
        """The next piece that was not written to `direct`; the last one may be empty."""
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

    def _on_ready(self) -> None:
        """Called for each token of a stream."""
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
        self._alarm = self._loop.call_later(seconds, self._check_silence)

    def _check_silence(self) -> None:
        assert self._source.quiet_s is not None
        left_s = self._active_s + self._source.quiet_s - self._loop.time()
        if left_s <= 0:
            left_s = self._source.quiet_s
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(self._source.ping())
        self._set_alarm(left_s)


class EventStream(EventSourceResponse):
    """sse-starlette's response with exactly the given headers.

    Differences: pings are part of the pieces, since they are due only after silence; at shutdown, open streams may
    finish within the drain timeout; the connection reports a client disconnect, even before the response.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        status_code: int = 200,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """on_close: called once, at the end of the stream or if it cannot start"""
        super().__init__(pieces, status_code, ping=0)
        retry = {"retry-after": RETRY_AFTER_S} if status_code == 503 else {}
        self.init_headers({**headers, **retry})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._presence: ClientPresence = scope[PRESENCE]
        try:
            await super().__call__(scope, receive, send)
        except (ClientDisconnect, OSError):
            return
        finally:
            self._on_close()

    async def _listen_for_disconnect(self, receive: Receive) -> None:
        await self._presence.until_lost()

    @staticmethod
    async def _listen_for_exit_signal() -> None:
        await asyncio.get_running_loop().create_future()
