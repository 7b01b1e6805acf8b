"""Serves one ASGI application on one bound socket.

Invariant: an idle process is never woken. Only the graceful shutdown of uvicorn's server is used, not its main loop,
which ticks ten times per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import log_bug
from ..limits import HttpLimits
from ..shared_counts import Counts
from .acceptor import Acceptor, Place, Places
from .errors import STOPPING, refusing
from .protocol import GuardedProtocol
from .site_check import SiteCheck
from .tunnel import Tunnels

_BACKLOG: Final = 2048


class HttpEndpoint:
    def __init__(
        self,
        app: ASGIApp,
        claim: socket.socket,
        tls: Callable[[], ssl.SSLContext | None],
        tunnels: Tunnels | None = None,
        sites: SiteCheck | None = None,
    ) -> None:
        """tls: called for each connection
        tunnels: accept websockets
        sites: which pages may send requests; None: all
        """
        self._socket = claim
        self._tls = tls
        self._tunnels = tunnels
        self._sites = sites
        self.port: int | None = None if claim.family == socket.AF_UNIX else claim.getsockname()[1]
        self._config = uvicorn.Config(
            _with_errors_handled(app),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # client addresses are never taken from headers
            date_header=False,
        )
        self._config.load()
        self._server = uvicorn.Server(self._config)
        self._server.servers = []
        self._server.lifespan = self._config.lifespan_class(self._config)

    async def start(
        self, limits: HttpLimits, protocol: type[GuardedProtocol], first_reserved: int, counts: Counts | None = None
    ) -> None:
        """counts: see Places. Raises OSError if another process already listens on the port."""
        self._config.timeout_keep_alive = limits.keep_alive_s  # type: ignore[assignment]  # seconds for call_later
        loop = asyncio.get_running_loop()

        def make_protocol(place: Place) -> asyncio.Protocol:
            options: dict[str, Any] = {"config": self._config, "server_state": self._server.server_state}
            return protocol(limits, place, self._tunnels, self._sites, app_state={}, _loop=loop, **options)

        self._socket.listen(_BACKLOG)
        acceptor = Acceptor(
            self._socket,
            Places(limits, counts),
            make_protocol,
            self._tls,
            limits.handshake_timeout_s,
            first_reserved,
        )
        acceptor.start()
        self._server.servers = [acceptor]  # type: ignore[list-item]  # it has the methods that are called
        self._server.started = True

    async def stop(self, grace_s: float) -> None:
        """Stops listening, waits up to `grace_s` for running responses, and cancels the rest."""
        self._config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        await self._server.shutdown(sockets=[self._socket])


def _with_errors_handled(app: ASGIApp) -> ASGIApp:
    """Wraps `app` so that its exceptions are logged as internal errors: Starlette raises them again after its 500, and
    uvicorn would log their text. Requests cancelled by the shutdown get a response."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # the response has begun
                await refusing(503, STOPPING)(scope, receive, send)
        except Exception as error:
            log_bug(f"{scope['method']} {scope['path']} failed", error)

    return logged
