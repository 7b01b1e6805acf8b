"""Changes of models and settings are known to every frontend process before their client is answered.

For: the host's private HTTP socket and gRPC server. Does not know: how frontends are told. Invariant: a client that was
told of its change finds it through any connection, also one to another frontend.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
