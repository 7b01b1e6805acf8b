"""What stands between the connections of a process and its application, where frontend processes have the clients.

For: the network side of a server, which has no edge where one process does everything. Does not know: how either side
is started. Invariant: one of the two decides about a request: the frontend process about its own, the host about those
that are passed on to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..http.tunnel import Tunnels
from .host_http import HostApplication, from_frontends
from .host_rpcs import HostRpcs

Announce = Callable[[], Awaitable[object]]
"""Returns once every frontend knows of the host's models and settings as they are now."""

_PATHS: Final = ("/v2/repository/models/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_TRACE_SETTING: Final = "/trace/setting"
_RPCS: Final = frozenset(
    f"/inference.GRPCInferenceService/{name}"
    for name in ("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting")
)


def announcing(app: ASGIApp, announce: Announce) -> ASGIApp:
    """`app`, whose responses to changes begin when they are known."""

    async def known(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_known(message: Message) -> None:
            if message["type"] == "http.response.start":
                await announce()
            await send(message)

        await app(scope, receive, send_known if _changes(scope) else send)

    return known


def _changes(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and (path.startswith(_PATHS) or path.endswith(_TRACE_SETTING))


class AnnouncingRpcs(grpc.aio.ServerInterceptor):
    """The same for RPCs."""

    def __init__(self, announce: Announce) -> None:
        self._announce = announce

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler_call_details.method not in _RPCS or handler is None or handler.unary_unary is None:
            return handler

        async def known(request: Any, context: Any) -> Any:
            try:
                return await handler.unary_unary(request, context)
            finally:
                await self._announce()

        return handler._replace(unary_unary=known)


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
