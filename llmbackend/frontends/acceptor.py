"""Takes the connections of one listening socket.

For: HttpEndpoint. Does not know: HTTP, beyond the bytes of a refusal. Invariants: a connection has its place before its
TLS handshake, and the handshake ends in time; a connection for which there is no descriptor outside the reserve, or no
place, is closed at once; a machine that lacks descriptors or memory makes the acceptor pause, not spin or fail.
Why not the event loop's own server: it accepts whatever comes, and tells of a connection only after its handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

from .connections import Place, Places
from .http_refusals import refusal_bytes

log = logging.getLogger(__name__)

_ACCEPTED_AT_ONCE: Final = 64
"""In one turn of the event loop."""
_PAUSE_S: Final = 0.5
_WARN_EVERY_S: Final = 60.0
_SHUTDOWN_TIMEOUT_S: Final = 5.0
_REFUSAL: Final = refusal_bytes("", 503, "the server has no room for another connection")


class Acceptor:
    """Has the methods of an asyncio server that uvicorn calls at its end."""

    def __init__(
        self,
        listener: socket.socket,
        places: Places,
        make_protocol: Callable[[Place], asyncio.Protocol],
        tls: Callable[[], ssl.SSLContext | None],
        handshake_timeout_s: float,
        first_reserved: int,
    ) -> None:
        """`tls` is asked for each connection. `first_reserved`: the first descriptor that no connection may have."""
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
        """Accepts no more, and ends handshakes that are under way."""
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
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._warn(f"no connection can be accepted: {error}")
                self._pause()
                self._resuming = self._loop.call_later(_PAUSE_S, self._resume)
                return
            self._take(connection, address[0])

    def _take(self, connection: socket.socket, address: str) -> None:
        connection.setblocking(False)
        if connection.fileno() >= self._first_reserved:
            self._warn("connections are refused: the descriptors that are left are kept for engines and files")
            self._refuse(connection)
            return
        place = self._places.enter(address)
        if place is None:
            self._warn("connections are refused: the server is at its limit")
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
        except OSError as error:  # a handshake that failed, or took too long, or a client that is gone
            place.leave()
            connection.close()
            log.debug("a connection did not begin: %s", error)
        except BaseException:
            place.leave()
            connection.close()
            raise

    def _refuse(self, connection: socket.socket) -> None:
        """Without waiting for what the client wants, so that nothing is kept for it."""
        with connection, contextlib.suppress(OSError):
            if self._tls() is None:
                with contextlib.suppress(BlockingIOError):
                    connection.recv(1 << 16)  # what is unread at the end would have the answer thrown away
                connection.send(_REFUSAL)

    def _warn(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_at_s >= _WARN_EVERY_S:
            self._warned_at_s = now_s
            log.warning("%s (said at most once a minute)", text)
