"""The router of /v2/engine: what operators see of a server and do to it.

For: the HTTP application, beside the routers of other protocols. Does not know: what the endpoints do.
"""

from __future__ import annotations

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import ServerLog

from ..access.access_control import AccessControl
from ..http.openapi_parts import Json
from ..http.routing import Router
from ..inference_gate import InferenceGate
from . import engine_control, engine_events, server_reports

OPERATIONS: dict[tuple[str, str], Json] = (
    engine_control.OPERATIONS | engine_events.OPERATIONS | server_reports.OPERATIONS
)
SCHEMAS: Json = engine_control.SCHEMAS | server_reports.SCHEMAS


def create_operations_router(
    server: InferenceServer,
    gate: InferenceGate,
    access: AccessControl,
    facts: server_reports.ServerFacts | None = None,
    log: ServerLog | None = None,
) -> Router:
    """The operations of `server`. `gate`, `access` and `log` are those of the server's other frontends."""
    facts = facts or server_reports.ServerFacts()
    recent_log = (log or ServerLog()).recent
    router = Router()
    control = engine_control.EngineControlEndpoints
    control(server, allows_faults=facts.allows_kill).add_to(router)
    engine_events.EngineEventsEndpoint(server, recent_log, allows_kill=facts.allows_kill).add_to(router)
    server_reports.ServerReportEndpoints(server, gate, access, facts).add_to(router)
    return router
