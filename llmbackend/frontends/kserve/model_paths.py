"""The paths under /v2/models/{name}: which model and version they name, and a short way to their inference.

For: the HTTP application and the endpoints of models. Does not know: what handlers do. Invariants: a request that
DirectRoutes finds is handled and answered as the routers would do it (the same handlers, found in the routers; the same
responses to what they raise); all others, also those that nearly match, go through the routers. A router, its
middlewares and their guards cost more than the whole of a small inference, and have nothing to do for these routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..http.errors import response_to
from ..http.routing import ApiRoute

MODEL_PATHS: Final = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
_MAX_VERSION_DIGITS: Final = 18
Handler = Callable[[Request], Awaitable[Response]]
_OF_MODEL, _OF_VERSION = 5, 7
"""How many parts `/v2/models/{name}/infer` and `/v2/models/{name}/versions/{version}/infer` split into at slashes."""
_PREFIX: Final = ["", "v2", "models"]


def model_paths(action: str = "") -> tuple[str, ...]:
    """The paths of an action on a model, and on one of its versions."""
    return tuple(path + action for path in MODEL_PATHS)


def model_of(request: Request) -> tuple[str, int]:
    """(name, version) in the request's path; version -1 when the path has none. Raises HTTPException 404 for a version
    that is no number."""
    version = request.path_params.get("version")
    if version is None:
        return request.path_params["name"], -1
    if not (version.isascii() and version.isdecimal() and len(version) <= _MAX_VERSION_DIGITS):
        raise HTTPException(404)
    return request.path_params["name"], int(version)


class DirectRoutes:
    """Handlers of inference, found by one look at the path."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers

    @classmethod
    def of(cls, router: APIRouter) -> DirectRoutes:
        """The routes of `router` that are POST on a model's path plus one word and read their bodies themselves."""
        prefix = f"{MODEL_PATHS[0]}/"
        return cls(
            {
                route.path.removeprefix(prefix): route.endpoint
                for route in router.routes
                if isinstance(route, ApiRoute) and route.is_direct and route.path.startswith(prefix)
            }
        )

    def find(self, scope: Scope) -> Handler | None:
        """The handler, with the path's parameters put into `scope`; None where the routers have to look."""
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
    """Runs `handler` and sends its response, or that to its error. A bug is raised again after the response."""
    request = Request(scope, receive, send)
    bug: Exception | None = None
    try:
        response = await handler(request)
    except Exception as error:
        response, bug = await response_to(request, error)
    await response(scope, receive, send)
    if bug is not None:
        raise bug
