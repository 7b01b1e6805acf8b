"""Creates all frontends of a server process from its settings.

Used by serve.py, which imports this module while engines load, because that takes half a second. Independent of the
life of the process. Invariant: the frontends share one gate, one store and one access control.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import ServerLog
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.http_app import create_http_app
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.idempotency import IdempotentRequests
from llmbackend.frontends.journals.kept_answers import KeptAnswers
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.journals.resumable_streams import ResumableStreams
from llmbackend.frontends.openai.router import create_openai_router
from llmbackend.frontends.operations.router import ServerFacts, create_operations_router

from .frontend_server import FrontendServer
from .ports import UNIX, ClaimedPorts
from .settings import ServerSettings

if TYPE_CHECKING:
    from llmbackend.frontends.host_forwarding import Edge
    from llmbackend.frontends.shared_counts import Counts

    from .frontend_settings import HostFolder


def make_frontends(
    server: InferenceServer,
    settings: ServerSettings,
    access: AccessControl,
    server_log: ServerLog,
    store: ResponseStore,
    claims: ClaimedPorts,
    folder: HostFolder | None = None,
    counts: Counts | None = None,
    edge: Edge | None = None,
) -> FrontendServer:
    """Frontends on the claimed ports, ready to start.

    folder, counts, edge: set if the host has frontend processes. Its gRPC socket is then in `folder`, and its HTTP
        socket in `claims`.
    """
    kept = KeptAnswers(settings.store.resume_grace_s)
    context = FrontendContext.of(
        server,
        gate=InferenceGate(server, settings.limits.inference, counts),
        access=access,
        limits=settings.limits,
        log=server_log,
        options=settings.protocols,
        store=store,
        streams=ResumableStreams(kept),
        max_input_size_bytes=settings.http_max_input_size_bytes,
        max_body_bytes=settings.openai_max_input_size_bytes,
    )
    routers = (
        create_anthropic_router(context),
        create_openai_router(context),
        create_operations_router(server, context.gate, access, _facts(settings), server_log),
    )
    frontends = FrontendServer(
        context,
        create_http_app(context, routers, IdempotentRequests(settings.store.idempotency, kept)),
        http=settings.http,
        grpc=settings.grpc if folder is None else replace(settings.grpc, address=f"{UNIX}{folder.grpc}"),
        metrics=settings.metrics,
        claims=claims,
        pages=settings.pages,
        edge=edge,
    )
    frontends.bind()
    return frontends


def _facts(settings: ServerSettings) -> ServerFacts:
    return ServerFacts(
        allows_load=settings.options.model_control_mode == "explicit",
        allows_kill=settings.protocols.allow_fault_injection,
        flags=settings.flags,
    )
