"""Routes to handlers: a function from a request to a response.

For: the endpoints and the application that serves them. Does not know: what handlers do. Invariant: a route takes the
methods that it names, and no other: GET alone has no HEAD, as in Triton.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.routing import Router as StarletteRouter
from starlette.types import ASGIApp, Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]


class ExactRoute(Route):
    """Of exactly `methods`; Starlette's adds HEAD to GET."""

    def __init__(self, path: str, handler: Handler, methods: Collection[str]) -> None:
        super().__init__(path, handler, methods=methods)
        self.methods = set(methods)


class Router(StarletteRouter):
    """A list of routes. `add_route` is Starlette's, with HEAD beside GET."""

    def __init__(self) -> None:
        super().__init__(redirect_slashes=False)

    def add_handler(self, path: str, handler: Handler, methods: Collection[str]) -> None:
        self.routes.append(ExactRoute(path, handler, methods))


def without_trailing_slash(app: ASGIApp) -> ASGIApp:
    """`app`, for which a path under /v1 has no trailing slash, which some clients send."""

    def served(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path: str = scope.get("path", "")
        if path.startswith("/v1/") and path.endswith("/"):
            scope["path"] = path.rstrip("/")
        return app(scope, receive, send)

    return served
