"""Accepts connections on one listening socket, within the limits of the endpoint and of each client address.

Independent of HTTP, except for the bytes of a refusal. Invariants: a connection is counted from accept, before the TLS
handshake, until it is lost; it is closed at once if no place or no unreserved file descriptor is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

from ..limits import HttpLimits
from ..shared_counts import Counts, LocalCounts
from .errors import refusal_bytes

log = logging.getLogger(__name__)

_ACCEPT_BATCH: Final = 64
"""Connections accepted per turn of the event loop."""
_PAUSE_S: Final = 0.5
_WARN_EVERY_S: Final = 60.0
_SHUTDOWN_TIMEOUT_S: Final = 5.0
_REFUSAL: Final = refusal_bytes("", 503, "the server cannot accept another connection")
_SERVED: Final = "connections"
_SERVED_TO: Final = "connections of "
_WEBSOCKETS_OF: Final = "websockets of "
_PEER_PREFIX_V6: Final = 64
"""An IPv6 host usually has a whole /64."""


class Acceptor:
    """Accepts connections; has the methods of an asyncio server that uvicorn calls at shutdown.

    asyncio's own server accepts every connection and reports it only after the TLS handshake. Here handshakes have a
    timeout, and accepting pauses while the machine lacks file descriptors or memory.
    """

    def __init__(
        self,
        listener: socket.socket,
        places: Places,
        make_protocol: Callable[[Place], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        handshake_timeout_s: float,
        first_reserved: int,
    ) -> None:
        """tls: called for each connection
        first_reserved: the lowest descriptor that no connection may use
        """
        self._listener = listener
        self._places = places
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s
        self._first_reserved = first_reserved
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.TimerHandle | None = None
        self._warned_at_s = -_WARN_EVERY_S

    def start(self) -> None:
        self._listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stops accepting, and cancels handshakes."""
        self._pause()
        for task in self._beginning:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._beginning, return_exceptions=True)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _pause(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._warn(f"no connection can be accepted: {error}")
                self._pause()
                self._resuming = self._loop.call_later(_PAUSE_S, self._resume)
                return
            self._take(connection, address[0] if address else "")  # empty on a unix socket

    def _take(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        if connection.fileno() >= self._first_reserved:
            self._warn("refusing connections: the remaining file descriptors are reserved for engines and files")
            self._refuse(connection)
            return
        place = self._places.enter(address)
        if place is None:
            self._warn("refusing connections: the server is at its limit")
            self._refuse(connection)
            return
        task = self._loop.create_task(self._begin(connection, place))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    async def _begin(self, connection: socket.socket, place: Place) -> None:
        context = self._tls()
        options: dict[str, Any] = {}
        if context is not None:
            options = {
                "ssl": context,
                "ssl_handshake_timeout": self._handshake_timeout_s,
                "ssl_shutdown_timeout": _SHUTDOWN_TIMEOUT_S,
            }
        try:
            await self._loop.connect_accepted_socket(lambda: self._make_protocol(place), connection, **options)
        except BaseException as error:
            place.leave()
            connection.close()
            if not isinstance(error, OSError):  # an OSError is a failed handshake or a client disconnect
                raise
            log.debug("a connection could not be opened: %s", error)

    def _refuse(self, connection: socket.socket) -> None:
        """Sends the refusal and closes, without waiting for the request."""
        with connection, contextlib.suppress(OSError):
            if self._tls() is None:
                with contextlib.suppress(BlockingIOError):
                    connection.recv(1 << 16)  # closing with unread data would send a reset and lose the response
                connection.send(_REFUSAL)

    def _warn(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_at_s >= _WARN_EVERY_S:
            self._warned_at_s = now_s
            log.warning("%s (logged at most once a minute)", text)


class Place:
    """How a connection is counted: for the address `peer`, as served (refusal "") or refused (the reason)."""

    __slots__ = ("_places", "has_websocket", "peer", "refusal")

    def __init__(self, places: Places | None, peer: str, refusal: str) -> None:
        self._places = places
        self.peer = peer
        self.refusal = refusal
        self.has_websocket = False

    def reevaluate(self) -> str:
        """Re-evaluates `refusal` at a request, since other connections may have closed."""
        if self.refusal and self._places is not None:
            self._places.count_in(self, -1)
            self.refusal = self._places.refusal_of(self.peer)
            self._places.count_in(self, 1)
        return self.refusal

    def enter_websocket(self) -> str:
        """Counts the connection as a websocket, or returns why it is refused."""
        refusal = "" if self._places is None else self._places.enter_websocket(self.peer)
        self.has_websocket = not refusal
        return refusal

    def leave(self) -> None:
        """Idempotent."""
        places, self._places = self._places, None
        if places is not None:
            places.count_in(self, -1)
            if self.has_websocket:
                places.leave_websocket(self.peer)


class Places:
    """The connections of one endpoint, including those refused with a response. Used on its event loop."""

    def __init__(self, limits: HttpLimits, counts: Counts | None = None) -> None:
        """counts: shared with the other processes that serve this endpoint"""
        self._limits = limits
        self._counts = counts or LocalCounts()
        self._refused = 0

    def enter(self, address: str) -> Place | None:
        """A place for a connection from `address` ("": a unix socket); None: no capacity even to send a refusal."""
        peer = self._peer_of(address) if address else ""
        refusal = self.refusal_of(peer)
        if refusal and self._refused >= self._limits.max_refused_connections:
            return None
        place = Place(self, peer, refusal)
        self.count_in(place, 1)
        return place

    def enter_websocket(self, peer: str) -> str:
        """The refusal, or ""."""
        limit = self._limits.max_websockets_per_peer
        if peer and limit and self._counts.held(_WEBSOCKETS_OF + peer) >= limit:
            return f"the server is at its limit of {limit} websockets from one address"
        self._counts.add(_WEBSOCKETS_OF + peer, 1)
        return ""

    def leave_websocket(self, peer: str) -> None:
        self._counts.add(_WEBSOCKETS_OF + peer, -1)

    def count_in(self, place: Place, change: int) -> None:
        if place.refusal:
            self._refused += change
            return
        self._counts.add(_SERVED, change)
        if place.peer and self._limits.max_connections_per_peer:
            self._counts.add(_SERVED_TO + place.peer, change)

    def refusal_of(self, peer: str) -> str:
        limit, peer_limit = self._limits.max_connections, self._limits.max_connections_per_peer
        if self._counts.held(_SERVED) >= limit:
            return f"the server is at its limit of {limit} connections"
        if peer and peer_limit and self._counts.held(_SERVED_TO + peer) >= peer_limit:
            return f"the server is at its limit of {peer_limit} connections from one address"
        return ""

    def _peer_of(self, text: str) -> str:
        """The peer that `address` counts for; "" for a trusted one."""
        address = ipaddress.ip_address(text.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if any(address in network for network in self._limits.trusted_proxies):
            return ""
        if address.version == 6:
            return str(ipaddress.IPv6Network((address, _PEER_PREFIX_V6), strict=False))
        return str(address)
