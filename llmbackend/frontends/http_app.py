"""The HTTP application: KServe v2 with Triton's extensions, and whatever routers stand beside it on the same port.

For: the frontend server, tests, and embedding. Does not know: sockets, other protocols' content (they come as routers).
Invariant: a path is served exactly as written (no slash redirects, no implicit HEAD), everything else is Triton's 404
or 405. Inference on a model is found without the routers (direct_routes.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from starlette.types import Receive, Scope, Send

from llmbackend.core.inference_server import InferenceServer
from llmbackend.server_log import ServerLog

from .body_budget import BODY_LEASE, BodyBudget, BodyLease
from .direct_routes import DirectRoutes, serve
from .generate import GenerateEndpoints
from .http_errors import install_error_handlers
from .infer_http import InferEndpoint
from .inference import InferenceGate
from .kserve_http import DescriptionEndpoints, HealthEndpoints, RepositoryEndpoints
from .openapi import create_openapi_router
from .probes_http import ProbeEndpoints
from .protocol_options import DEFAULT_OPTIONS, ProtocolOptions
from .settings_http import SettingsEndpoints
from .shared_memory_http import SharedMemoryEndpoints
from .stop_http import StopEndpoint

DEFAULT_MAX_INPUT_SIZE_BYTES = 64 << 20


def create_http_app(
    server: InferenceServer,
    *,
    max_input_size_bytes: int = DEFAULT_MAX_INPUT_SIZE_BYTES,
    routers: Sequence[APIRouter] = (),
    gate: InferenceGate | None = None,
    options: ProtocolOptions | None = None,
    log: ServerLog | None = None,
) -> FastAPI:
    """The app around `server`; `routers` (the OpenAI API, say) are served beside /v2.

    `max_input_size_bytes` bounds a request's body, compressed and unpacked (Triton's --http-max-input-size). `gate` is
    the one that other frontends of `server` use, and so is `log`, the process's log that /v2/logging sets.
    """
    gate = gate or InferenceGate(server)
    gate.bodies.make_room_for(max_input_size_bytes)
    app = _App(title="llmbackend", redirect_slashes=False, docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app)
    served = (create_kserve_router(server, max_input_size_bytes, gate, options, log), *routers)
    for router in (*served, create_openapi_router(served)):
        app.include_router(router)
    app.direct = DirectRoutes.of(served[0])
    app.bodies = gate.bodies
    return app


class _App(FastAPI):
    direct: DirectRoutes
    bodies: BodyBudget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lease = scope[BODY_LEASE] = BodyLease(self.bodies)
        try:
            handler = self.direct.find(scope)
            if handler is None:
                await super().__call__(scope, receive, send)
            else:
                await serve(handler, scope, receive, send)
        finally:
            lease.release()


def create_kserve_router(
    server: InferenceServer,
    max_input_size_bytes: int,
    gate: InferenceGate | None = None,
    options: ProtocolOptions | None = None,
    log: ServerLog | None = None,
) -> APIRouter:
    router = APIRouter(redirect_slashes=False)
    gate = gate or InferenceGate(server)
    options = options or DEFAULT_OPTIONS
    InferEndpoint(gate, max_input_size_bytes, options.http_forward).add_to(router)  # first: routes are tried in order
    GenerateEndpoints(gate, max_input_size_bytes).add_to(router)
    HealthEndpoints(server).add_to(router)
    SettingsEndpoints(server, log or ServerLog()).add_to(router)
    SharedMemoryEndpoints(server).add_to(router)
    DescriptionEndpoints(server).add_to(router)
    RepositoryEndpoints(server, gate, max_input_size_bytes).add_to(router)
    StopEndpoint(server).add_to(router)
    ProbeEndpoints(gate, options.http_metrics).add_to(router)
    return router
