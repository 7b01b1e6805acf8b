"""What stands between the connections of a process and its application, where frontend processes have the clients.

For: the network side of a server, which has no edge where one process does everything. Does not know: how either side
is started. Invariant: one of the two decides about a request: the frontend process about its own, the host about those
that are passed on to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import grpc
from starlette.types import ASGIApp

from ..http.tunnel import Tunnels
from .announcing import Announce, AnnouncingRpcs, announcing
from .client_address import from_frontends
from .host_http import HostApplication
from .host_rpcs import HostRpcs


class Edge(Protocol):
    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, which has its access control already, as connections shall see it."""

    def tunnels(self, pages: Tunnels | None) -> Tunnels | None:
        """Where websockets go; `pages`: the process's own."""

    def interceptors(self, access: Sequence[grpc.aio.ServerInterceptor]) -> Sequence[grpc.aio.ServerInterceptor]:
        """All of a gRPC server, outermost first; `access`: those of access control. On the event loop."""

    async def close(self) -> None: ...


class FrontendEdge:
    """Of a frontend process: what it does not answer itself goes to the host."""

    def __init__(self, http_socket: Path, grpc_socket: Path, websocket_path: str) -> None:
        self._application = HostApplication(http_socket, websocket_path)
        self._grpc_socket = grpc_socket
        self._rpcs: HostRpcs | None = None

    def around(self, app: ASGIApp) -> ASGIApp:
        return self._application.behind(app)

    def tunnels(self, pages: Tunnels | None) -> Tunnels:
        return self._application

    def interceptors(self, access: Sequence[grpc.aio.ServerInterceptor]) -> Sequence[grpc.aio.ServerInterceptor]:
        self._rpcs = HostRpcs(self._grpc_socket)
        return (self._rpcs, *access, self._rpcs.kept_streams)

    async def close(self) -> None:
        if self._rpcs is not None:
            await self._rpcs.close()


class HostEdge:
    """Of the host: its requests come from frontend processes."""

    def __init__(self, announce: Announce) -> None:
        self._announce = announce

    def around(self, app: ASGIApp) -> ASGIApp:
        return from_frontends(announcing(app, self._announce))

    def tunnels(self, pages: Tunnels | None) -> Tunnels | None:
        return pages

    def interceptors(self, access: Sequence[grpc.aio.ServerInterceptor]) -> Sequence[grpc.aio.ServerInterceptor]:
        return (*access, AnnouncingRpcs(self._announce))

    async def close(self) -> None:
        """Nothing is open."""
