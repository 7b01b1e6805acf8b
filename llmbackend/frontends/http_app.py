"""The HTTP application: KServe v2 with Triton's extensions, and the routers of other protocols on the same port.

Independent of sockets and of the content of other protocols. Invariant: a path is served exactly as written (no slash
redirects, no implicit HEAD); anything else gets Triton's 404 or 405.
"""

from __future__ import annotations

import importlib
import inspect
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from fastapi import APIRouter, FastAPI
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmbackend.core.inference_server import InferenceServer

from .context import FrontendContext
from .http.direct_body import DirectBody
from .http.errors import install_error_handlers, response_to
from .http.request_body import BODY_LEASE, BodyBudget, BodyLease
from .http.routing import ApiRoute
from .inference_gate import InferenceGate
from .journals.idempotency import IdempotentRequests
from .kserve.control_http import (
    DescriptionEndpoints,
    HealthEndpoints,
    MetadataEndpoints,
    RepositoryEndpoints,
    SettingsEndpoints,
    SharedMemoryEndpoints,
    StopEndpoint,
)
from .kserve.generate import GenerateEndpoints
from .kserve.http_types import MODEL_PATHS
from .kserve.infer_http import InferEndpoint
from .openapi import DocumentEndpoints, FirstLines
from .operations.probes import MetricsEndpoint, ProbeEndpoints
from .protocol_options import CorsOptions

_READABLE_HEADERS: Final = (
    "Inference-Header-Content-Length",
    "Retry-After",
    "endpoint-load-metrics",
    "X-Stream-Id",
    "Idempotent-Replayed",
    "X-Schema-Not-Enforced",
    "X-Schema-Valid",
)
"""Response headers that a page of another site may read, in addition to those that the Fetch standard always allows."""
Handler = Callable[[Request], Awaitable[Response]]
_MODEL_PATH: Final = re.compile("/v2/models/([^/]+)(?:/versions/([^/]+))?/([^/]+)").fullmatch


def create_http_app(
    context: FrontendContext, routers: Sequence[APIRouter] = (), idempotent: IdempotentRequests | None = None
) -> FastAPI:
    """The application of a host in this process.

    routers: other protocols, such as the OpenAI API
    idempotent: stores responses for retried requests; None: `Idempotency-Key` has no effect
    """
    context.gate.bodies.raise_to_fit(context.max_input_size_bytes)
    app = _application((_kserve_router(context), *routers), context.gate)
    FirstLines(app.routes).add_to(app.router)
    if context.options.documents_api:
        DocumentEndpoints(app.routes, context.options.root_path).add_to(app.router)
    app.idempotent = idempotent
    return app


def create_inference_app(context: FrontendContext, routers: Sequence[APIRouter]) -> FastAPI:
    """Inference, metadata and readiness, for a frontend process; the host's process serves the rest."""
    context.gate.bodies.raise_to_fit(context.max_input_size_bytes)
    kserve = _inference_router(context)
    HealthEndpoints(context.gate).add_to(kserve)
    MetadataEndpoints(context.server).add_to(kserve)
    ProbeEndpoints(context.gate).add_to(kserve)
    return _application((kserve, *routers), context.gate)


def _application(routers: Sequence[APIRouter], gate: InferenceGate) -> _App:
    """The first of `routers` has the inference paths."""
    app = _App(
        routes=[route for router in routers for route in router.routes],
        redirect_slashes=False,
        openapi_url=None,  # openapi.py serves the document, without HEAD
        telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
    )
    install_error_handlers(app)
    app.direct = _direct_handlers(routers[0])
    app.direct_paths = _direct_paths(app.router.routes)
    app.bodies = gate.bodies
    return app


def _direct_handlers(router: APIRouter) -> dict[str, Handler]:
    """The handlers of inference by the last word of their path. They are called without the routers, whose middleware
    costs more than a small inference. The routes consist of a model's path and one word, and read their bodies
    themselves."""
    prefix = f"{MODEL_PATHS[0]}/"
    return {
        route.path.removeprefix(prefix): route.endpoint
        for route in router.routes
        if isinstance(route, ApiRoute) and route.is_direct and route.path.startswith(prefix)
    }


def _direct_paths(routes: Sequence[BaseRoute]) -> dict[str, Handler]:
    """The same for paths without parameters, where the router would choose that route."""
    found: dict[str, Handler] = {}
    for route in routes:
        if isinstance(route, ApiRoute) and route.is_direct and route.methods == {"POST"} and "{" not in route.path:
            scope: Scope = {"type": "http", "method": "POST", "path": route.path, "headers": []}
            chosen = next(one for one in routes if one.matches(scope)[0] is Match.FULL)
            if chosen is route:
                found[route.path] = route.get_route_handler()
    return found


def _direct_handler(handlers: Mapping[str, Handler], paths: Mapping[str, Handler], scope: Scope) -> Handler | None:
    """The handler, after the path parameters were put into `scope`; None: use the routers, also for near matches."""
    if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
        return None
    if (handler := paths.get(scope["path"])) is not None:
        return handler
    match = _MODEL_PATH(scope["path"])
    if match is None:
        return None
    name, version, action = match.groups()
    handler = handlers.get(action)
    if handler is not None:
        scope["path_params"] = {"name": name} if version is None else {"name": name, "version": version}
    return handler


async def _serve(handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the response of `handler`, or the one to its error. Internal errors are raised again afterwards."""
    request = Request(scope, receive, send)
    bug: Exception | None = None
    try:
        response = await handler(request)
    except Exception as error:
        response, bug = await response_to(request, error)
    await response(scope, receive, send)
    if bug is not None:
        raise bug


class _App(FastAPI):
    """Replays stored responses to retried requests, and gives each request a lease of the body budget."""

    direct: Mapping[str, Handler]
    direct_paths: Mapping[str, Handler]
    bodies: BodyBudget
    idempotent: IdempotentRequests | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.idempotent is not None and self.idempotent.applies_to(scope):
            await self.idempotent.serve(self._serve, scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        lease = scope[BODY_LEASE] = BodyLease(self.bodies)
        try:
            handler = _direct_handler(self.direct, self.direct_paths, scope)
            if handler is None:
                await super().__call__(scope, receive, send)
            else:
                await _serve(handler, scope, receive, send)
        finally:
            lease.release()


def _kserve_router(context: FrontendContext) -> APIRouter:
    """Everything under /v2, and the probes."""
    server, gate = cast(InferenceServer, context.server), context.gate
    router = _inference_router(context)
    HealthEndpoints(gate).add_to(router)
    SettingsEndpoints(server, context.log).add_to(router)
    SharedMemoryEndpoints(server).add_to(router)
    DescriptionEndpoints(server).add_to(router)
    MetadataEndpoints(server).add_to(router)
    RepositoryEndpoints(server, gate, context.max_input_size_bytes).add_to(router)
    StopEndpoint(server).add_to(router)
    ProbeEndpoints(gate).add_to(router)
    if context.options.http_metrics:
        MetricsEndpoint(server.metrics_registry).add_to(router)
    return router


def _inference_router(context: FrontendContext) -> APIRouter:
    """infer, generate and generate_stream: first, since routes are tried in order."""
    router = APIRouter()
    InferEndpoint(context.gate, context.max_input_size_bytes, context.options.http_forward).add_to(router)
    GenerateEndpoints(context.gate, context.max_input_size_bytes, context.streams).add_to(router)
    return router


def with_request_ids(app: ASGIApp) -> ASGIApp:
    """`app` with the response header X-Request-Id: the client's, or a new one, as in vLLM."""

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        header = (b"x-request-id", given or uuid.uuid4().hex.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await app(scope, receive, send_with_id)

    return served


def imported_middleware(path: str) -> Callable[[ASGIApp], ASGIApp]:
    """path: module.name of an ASGI middleware class or of a coroutine function (request, next), as in vLLM. Raises
    ValueError."""
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"'{path}' cannot be imported: {error}") from None
    if inspect.iscoroutinefunction(found):
        return partial(BaseHTTPMiddleware, dispatch=found)
    if not inspect.isclass(found):
        raise ValueError(f"'{path}' is neither a class nor a coroutine function")
    return cast(Callable[[ASGIApp], ASGIApp], found)


def with_middleware(app: ASGIApp, middleware: Sequence[Callable[[ASGIApp], ASGIApp]]) -> ASGIApp:
    """Wraps `app` in `middleware`, the last one outermost; all bodies become ASGI messages, visible to middleware."""
    if not middleware:
        return app
    for make in middleware:
        app = make(app)
    inner = app

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        DirectBody.remove_from(scope)
        await inner(scope, receive, send)

    return served


def with_cors(app: ASGIApp, options: CorsOptions) -> ASGIApp:
    """`app` with the CORS protocol of the Fetch standard; `app` itself if no origin is allowed.

    Must be outside access control: a browser's preflight has no key, and a page may read why it was refused.
    """
    if not options.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=options.origins,
        allow_credentials=options.credentials,
        allow_methods=options.methods,
        allow_headers=options.headers,
        expose_headers=_READABLE_HEADERS,
    )
