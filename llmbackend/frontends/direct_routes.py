"""The way to a model's inference without the routers: one look at the path.

For: the HTTP app. Does not know: what handlers do. Invariants: a request that is taken here is handled and answered as
the routers would have it (the same handlers, found in the routers; the same answers to what they raise); all others,
also those that nearly match, go the routers' way. A router, its middlewares and their guards cost more than the whole
of a small inference, and they have nothing to do for these routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .http_errors import error_answer
from .kserve_http import MODEL_PATHS

Handler = Callable[[Request], Awaitable[Response]]
_OF_MODEL, _OF_VERSION = 5, 7
"""How many parts `/v2/models/{name}/infer` and `/v2/models/{name}/versions/{version}/infer` have between slashes."""
_PREFIX: Final = ["", "v2", "models"]


class DirectRoutes:
    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    @classmethod
    def of(cls, router: APIRouter) -> DirectRoutes:
        """Those of `router` that are POST on a model's path plus one word, and have a plain handler."""
        prefix = f"{MODEL_PATHS[0]}/"
        return cls(
            {
                route.path.removeprefix(prefix): route.endpoint
                for route in router.routes
                if type(route) is Route and route.path.startswith(prefix) and route.methods == {"POST"}
            }
        )

    def find(self, scope: Scope) -> Handler | None:
        """The handler, with the path's parameters put into `scope`; None where the routers must look."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            return None
        parts = scope["path"].split("/")
        handler = self._handlers.get(parts[-1])
        if handler is None or parts[:3] != _PREFIX or not all(parts[3:]):
            return None
        if len(parts) == _OF_MODEL:
            scope["path_params"] = {"name": parts[3]}
            return handler
        if len(parts) == _OF_VERSION and parts[4] == "versions":
            scope["path_params"] = {"name": parts[3], "version": parts[5]}
            return handler
        return None


async def serve(handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
    """Raises what was not foreseen, after the client has had its answer."""
    request = Request(scope, receive, send)
    bug: Exception | None = None
    try:
        response = await handler(request)
    except Exception as error:
        response, bug = await error_answer(request, error)
    await response(scope, receive, send)
    if bug is not None:
        raise bug
