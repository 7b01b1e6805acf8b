"""A websocket whose bytes are forwarded unread to another process.

Invariants: bytes arrive in order; backpressure applies in both directions, so at most two socket buffers are held; when
one side is gone, the other is closed within `_CLOSE_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeVar

P = TypeVar("P", bound=asyncio.BaseProtocol)

_CLOSE_TIMEOUT_S: Final = 5.0
_MAX_EARLY_BYTES: Final = 64 << 10
"""Limit of bytes that a client may send before the other side is connected."""


class Tunnels(Protocol):
    """Decides which websockets are forwarded, and where to."""

    def takes_websocket(self, target: bytes) -> bool: ...

    def websocket_refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str: ...

    async def connect(self, make_protocol: Callable[[], P]) -> P:
        """Raises an Exception whose text is shown to the client."""

    def left(self) -> None:
        """Must be called once at the end of each connection."""


class Tunnel(asyncio.Protocol):
    """The client's side, from the upgrade on. `on_end` is called once the client's connection is lost."""

    def __init__(
        self, transport: asyncio.Transport, tunnels: Tunnels, connections: set[Any], on_end: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._tunnels = tunnels
        self._connections = connections
        """A stopping server waits for these."""
        self._on_end = on_end
        self._early = b""
        self._far: _FarSide | None = None
        connections.add(self)

    async def open(self, head: bytes, refuse: Callable[[str], bytes]) -> None:
        """head: the client's request. refuse: creates the response to a request that cannot be forwarded"""
        try:
            far = await self._tunnels.connect(lambda: _FarSide(self._transport, self._tunnels))
        except Exception as error:
            self._transport.write(refuse(str(error)))
            self.shutdown()
            return
        if self._transport.is_closing():
            far.close()
            return
        self._far = far
        far.write(head + self._early)

    def data_received(self, data: bytes) -> None:
        if self._far is not None:
            self._far.write(data)
        elif len(self._early) + len(data) <= _MAX_EARLY_BYTES:
            self._early += data
        else:
            self._transport.abort()

    def pause_writing(self) -> None:
        if self._far is not None:
            self._far.pause_reading()

    def resume_writing(self) -> None:
        if self._far is not None:
            self._far.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._on_end()
        if self._far is not None:
            self._far.close()

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops."""
        close_soon(self._transport)


class _FarSide(asyncio.Protocol):
    """The other process's side."""

    def __init__(self, client: asyncio.Transport, tunnels: Tunnels) -> None:
        self._client = client
        self._tunnels = tunnels

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the loop calls it
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    def pause_writing(self) -> None:
        self._client.pause_reading()

    def resume_writing(self) -> None:
        if not self._client.is_closing():
            self._client.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tunnels.left()
        close_soon(self._client)

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        self._transport.abort()


def close_soon(transport: asyncio.Transport) -> None:
    """Closes once the peer has read what was written, within _CLOSE_TIMEOUT_S."""
    transport.close()
    if transport.get_write_buffer_size():
        asyncio.get_running_loop().call_later(_CLOSE_TIMEOUT_S, transport.abort)
