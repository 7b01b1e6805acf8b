"""All frontends of a server process, made from its settings.

For: serve.py, which imports this module while the engines load: what it imports takes half a second. Does not know: the
life of the process. Invariant: frontends of one server share one gate, one store and one access control.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import ServerLog
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.generation.sealed_reasoning import sealing_key
from llmbackend.frontends.http_app import create_http_app
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.idempotency import IdempotentRequests
from llmbackend.frontends.journals.kept_answers import KeptAnswers
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.journals.resumable_streams import ResumableStreams
from llmbackend.frontends.openai.router import create_openai_router
from llmbackend.frontends.operations.router import ServerFacts, create_operations_router

from .frontend_server import FrontendServer
from .ports import ClaimedPorts
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
    """Frontends that are ready to start, on the ports that were claimed.

    folder, counts, edge: of a host with frontend processes, which has a socket in `folder` for gRPC, and one for HTTP
    among `claims`."""
    gate = InferenceGate(server, settings.limits.inference, counts)
    kept = KeptAnswers(settings.store.resume_grace_s)
    streams = ResumableStreams(kept)
    operations = create_operations_router(server, gate, access, _facts(settings), server_log)
    frontends = FrontendServer(
        server,
        http_address=settings.http.address,
        http_port=settings.http.port_or_none,
        grpc_address=settings.grpc.address if folder is None else f"unix:{folder.grpc}",
        grpc_port=settings.grpc.port_or_none,
        metrics_address=settings.metrics.address,
        metrics_port=settings.metrics.port_or_none,
        http_reuse_port=settings.http.reuse_port,
        http_app=create_http_app(
            server,
            max_input_size_bytes=settings.http_max_input_size_bytes,
            routers=(*_model_apis(server, settings, gate, streams, store), operations),
            gate=gate,
            options=settings.protocols,
            log=server_log,
            streams=streams,
            idempotent=IdempotentRequests(settings.store.idempotency, kept),
        ),
        access=access,
        gate=gate,
        limits=settings.limits,
        protocols=settings.protocols,
        log=server_log,
        claims=claims,
        pages=settings.pages,
        edge=edge,
        streams=streams,
    )
    frontends.bind()
    return frontends


def _model_apis(
    server: InferenceServer,
    settings: ServerSettings,
    gate: InferenceGate,
    streams: ResumableStreams,
    store: ResponseStore,
) -> tuple[APIRouter, ...]:
    """The APIs that others than Triton have made."""
    protocols = settings.protocols
    common = (server, settings.openai_max_input_size_bytes, gate, protocols.openai_lora_separator)
    key = sealing_key(protocols.reasoning_secret)
    return (
        create_anthropic_router(*common, sealing_key=key),
        create_openai_router(
            *common,
            streams,
            store=store,
            sealing_key=key,
            lora_folder=protocols.openai_lora_folder,
            fingerprint=protocols.openai_fingerprint,
            defaults=protocols.request_defaults,
        ),
    )


def _facts(settings: ServerSettings) -> ServerFacts:
    return ServerFacts(
        allows_load=settings.options.model_control_mode == "explicit",
        allows_kill=settings.protocols.allow_fault_injection,
        flags=settings.flags,
    )
