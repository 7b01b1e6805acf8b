"""All frontends of a server process, made from its settings.

For: serve.py, which imports this module, in half a second, while engines load. Does not know: the life of the process.
Invariant: the frontends share one gate, one store and one access control.
"""

from __future__ import annotations

from dataclasses import replace
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

    folder, counts, edge: of a host with frontend processes; its gRPC socket is in `folder`, its HTTP socket in
    `claims`.
    """
    protocols = settings.protocols
    gate = InferenceGate(server, settings.limits.inference, counts)
    kept = KeptAnswers(settings.store.resume_grace_s)
    streams = ResumableStreams(kept)
    frontends = FrontendServer(
        server,
        http=settings.http,
        grpc=settings.grpc if folder is None else replace(settings.grpc, address=f"{UNIX}{folder.grpc}"),
        metrics=settings.metrics,
        http_app=create_http_app(
            server,
            max_input_size_bytes=settings.http_max_input_size_bytes,
            routers=(
                *_chat_routers(server, settings, gate, streams, store),
                create_operations_router(server, gate, access, _facts(settings), server_log),
            ),
            gate=gate,
            options=protocols,
            log=server_log,
            streams=streams,
            idempotent=IdempotentRequests(settings.store.idempotency, kept),
        ),
        access=access,
        gate=gate,
        limits=settings.limits,
        protocols=protocols,
        log=server_log,
        claims=claims,
        pages=settings.pages,
        edge=edge,
        streams=streams,
    )
    frontends.bind()
    return frontends


def _chat_routers(
    server: InferenceServer,
    settings: ServerSettings,
    gate: InferenceGate,
    streams: ResumableStreams,
    store: ResponseStore,
) -> tuple[APIRouter, APIRouter]:
    """Anthropic's API and OpenAI's."""
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
            shows_tokenizers=protocols.shows_tokenizers,
        ),
    )


def _facts(settings: ServerSettings) -> ServerFacts:
    return ServerFacts(
        allows_load=settings.options.model_control_mode == "explicit",
        allows_kill=settings.protocols.allow_fault_injection,
        flags=settings.flags,
    )
