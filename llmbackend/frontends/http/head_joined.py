"""HeadJoined: the transport of one response, which sends header and beginning of the body in one write.

For: GuardedProtocol. Does not know: HTTP, beyond that a response's first write is its header. Invariants: bytes leave
in the order in which they were written; only the header is held back, at most for the current turn of the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

_NOT_JOINED_BYTES: Final = 64 << 10
"""A body that begins with this much is written separately: copying it would cost more than the write."""


class HeadJoined(asyncio.Transport):
    """uvicorn writes the header separately, and each write is a packet, a system call and a wake-up of the client: a
    tenth of the time of a small request."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        """`close` ends the connection once the response is written."""
        self._transport = transport
        self._loop = loop
        self._close = close
        self._is_first = True
        self._head: bytes | None = None
        self._flushing: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:  # type: ignore[override]  # as uvicorn calls it
        if self._is_first:
            self._is_first = False
            self._head = data
            self._flushing = self._loop.call_soon(self._flush)
        elif self._head is None:
            self._transport.write(data)
        elif len(data) >= _NOT_JOINED_BYTES:
            self._flush()
            self._transport.write(data)
        else:
            self._head += data
            self._flush()

    def close(self) -> None:
        self._flush()
        self._close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)
