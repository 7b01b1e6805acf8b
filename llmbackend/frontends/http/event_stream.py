"""Streams of server-sent events: `EventStream` sends pieces, whole events each, and `pieces_of` makes them of a source.

For: every endpoint that streams. Does not know: what an event says, where it comes from. Invariants: what a source has
ready goes out in one piece. While the client keeps up, a piece is written by the call that announces its tokens, and
the task of the request sleeps; what has to be awaited, a client that is behind, the end and errors are the task's. Both
ways send the same bytes. However a stream ends, `on_close` is called.
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
        """A comment that shows that the stream is alive."""
        ...


def pieces_of(source: EventSource, direct: DirectBody | None = None) -> AsyncGenerator[bytes, None]:
    """The events of `source` in pieces. While the generator waits, what is ready is written to `direct` instead, if
    there is one and it is open."""
    return _PieceReader(source, direct).pieces()


class _PieceReader:
    def __init__(self, source: EventSource, direct: DirectBody | None) -> None:
        self._source = source
        self._direct = direct
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[bytes] | None = None
        """Set while the generator waits. Its result is a piece that was made already."""
        self._alarm: asyncio.TimerHandle | None = None
        self._active_s = 0.0
        """When the last piece was made."""

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        source = self._source
        source.listen(self._heard)
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
        """The next piece that was not written; the last one, which may be empty, when the source is over."""
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

    def _heard(self) -> None:
        """Called for each token of a stream; everything else here is called seldom."""
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


class EventStream(EventSourceResponse):
    """sse-starlette's response with `pieces` as its body and exactly the headers that are given.

    It differs in what it waits for: pings are part of the pieces, since they are due after silence only; a server that
    is told to stop lets open streams end by themselves, within its own time limit for draining; and the connection
    itself reports that its client is gone, also before the response begins.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        status_code: int = 200,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """on_close: called once, when the stream is over or could not begin."""
        super().__init__(pieces, status_code, ping=0)
        retry = {"retry-after": RETRY_AFTER_S} if status_code == 503 else {}
        self.init_headers({**headers, **retry})
        self._on_close = on_close
        self._presence: ClientPresence | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._presence = scope.get(PRESENCE)
        try:
            await super().__call__(scope, receive, send)
        except (ClientDisconnect, OSError):
            return
        finally:
            self._on_close()

    async def _listen_for_disconnect(self, receive: Receive) -> None:
        if self._presence is None:  # under another ASGI server
            await super()._listen_for_disconnect(receive)
        else:
            await self._presence.until_lost()

    @staticmethod
    async def _listen_for_exit_signal() -> None:
        await asyncio.get_running_loop().create_future()
