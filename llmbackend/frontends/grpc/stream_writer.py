"""Writes the messages of one gRPC call, one at a time, without a task.

For: streams. Does not know: messages' contents, requests. Invariants: gRPC has one write of a call in progress; that a
write has ended is looked at when the next one comes, so that a message costs no wake-up of its own; a write that the
client's flow control holds up for too long is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from .rpc import Context


class StreamWriter:
    """Used on the event loop alone.

    It runs gRPC's coroutines of writes itself, as a task would: `send` runs one up to the future that it waits for.
    Raises nothing: `on_failure` gets the exception when the call has ended or a write has failed, and `on_stall` is
    called when the client has taken nothing for `timeout_s`; after either, nothing more is written.
    """

    def __init__(
        self,
        context: Context,
        timeout_s: float,
        on_failure: Callable[[BaseException], object],
        on_stall: Callable[[], object],
    ) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._write: Coroutine[Any, Any, None] | None = None
        self._future: asyncio.Future[Any] | None = None
        """What the write in progress waits for."""
        self._when_free: list[Callable[[], object]] = []
        self._began_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def is_free(self) -> bool:
        """Whether `write` may be called: none is in progress, and none has failed."""
        if self._future is not None and self._future.done():
            self._advance()
        return self._write is None and not self._is_closed

    def write(self, message: bytes) -> None:
        self._write = self._context.write(message)
        self._advance()
        self._began_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def when_free(self, callback: Callable[[], object]) -> None:
        """Calls back once, as soon as no write is in progress: now, if none is."""
        if self.is_free:
            callback()
        elif not self._is_closed:
            if not self._when_free and self._future is not None:
                self._future.add_done_callback(self._ended)
            self._when_free.append(callback)

    async def idle(self) -> None:
        """Waits for the end of the write in progress."""
        while not self.is_free and self._future is not None:
            await asyncio.wait([self._future])

    def close(self) -> None:
        """Gives up the write in progress. Idempotent. The callbacks, which refer to its owner, are given up, too."""
        self._is_closed = True
        self._on_failure = self._on_stall = _nothing
        self._when_free.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._future is not None:
            self._future.cancel()
        if self._write is not None:
            self._write.close()
        self._write = self._future = None

    def _advance(self) -> None:
        """Runs the write to the next future that it waits for, or to its end."""
        assert self._write is not None
        try:
            future = self._write.send(None)
        except StopIteration:
            self._write = self._future = None
        except (Exception, asyncio.CancelledError) as error:
            self._write = self._future = None
            on_failure = self._on_failure
            self.close()
            on_failure(error)
        else:
            future._asyncio_future_blocking = False  # as a task does that begins to wait for it
            self._future = future

    def _ended(self, _: asyncio.Future[Any]) -> None:
        callbacks, self._when_free = self._when_free, []
        for callback in callbacks:
            self.when_free(callback)

    def _look(self) -> None:
        self._timer = None
        if self.is_free or self._is_closed:
            return
        left_s = self._began_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._on_stall()


def _nothing(*_: object) -> None:
    """Takes the place of callbacks."""
