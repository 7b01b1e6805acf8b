"""A TCP link that can be cut: it forwards between two processes, or stops forwarding.

Used by clusters whose links can be cut. Independent of the traffic. Invariants: while the link is cut, no byte passes,
and neither side learns that the other has closed or does not respond; when it is restored, everything sent before
arrives in order. Used on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

_CONNECT_TIMEOUT_S = 10.0


class Relay:
    """From a port of its own on loopback to (host, port) of `target`, which is asked for each connection."""

    def __init__(self, name: str, target: Callable[[], tuple[str, int]]) -> None:
        self.name = name
        self.port = 0
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self.pipes: set[_Pipe] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def is_cut(self) -> bool:
        return not self._open.is_set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Pipe(self, self._accepted), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._open.clear()
        for pipe in self.pipes:
            pipe.hold()

    def heal(self) -> None:
        self._open.set()
        for pipe in list(self.pipes):
            pipe.let_go()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connecting:
            task.cancel()
        for pipe in list(self.pipes):
            pipe.abort()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close their sockets

    def _accepted(self, near: _Pipe) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(near))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, near: _Pipe) -> None:
        await self._open.wait()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                _, far = await loop.create_connection(lambda: _Pipe(self, None), *self._target())
        except OSError:  # TimeoutError is one
            near.abort()
            return
        near.other, far.other = far, near
        near.let_go()
        far.let_go()


class _Pipe(asyncio.Protocol):
    """One side of one connection."""

    def __init__(self, relay: Relay, on_open: Callable[[_Pipe], None] | None) -> None:
        self.other: _Pipe | None = None
        self._relay = relay
        self._on_open = on_open
        self._transport: asyncio.Transport | None = None
        self._has_ended = False
        self._waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._relay.pipes.add(self)
        self.hold()
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """Also of a connection that was told to pause: what its event loop had read already."""
        self._waiting.append(data)
        self._pass_on()

    def _pass_on(self) -> None:
        if self.other is None or self.other._transport is None or self._relay.is_cut:
            return
        if not self.other._transport.is_closing():
            for data in self._waiting:
                self.other._transport.write(data)
        self._waiting.clear()

    def eof_received(self) -> bool:
        """Each direction ends by itself."""
        self._has_ended = True
        self._pass_on()
        if self.other is None or self.other._transport is None or self.other._has_ended:
            return False
        if not self.other._transport.is_closing():
            self.other._transport.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._relay.pipes.discard(self)
        if self.other is not None and self.other._transport is not None:
            self.other._transport.close()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.hold()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.let_go()

    def hold(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def let_go(self) -> None:
        """Unless the link is cut, or there is no other side yet."""
        if self.other is None or self._relay.is_cut:
            return
        self._pass_on()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
