"""All frontends of a server process, made from its settings.

For: serve.py, which imports this module while the engines load: what it imports takes half a second. Does not know: the
life of the process. Invariant: frontends of one server share one gate, one store and one access control.
"""

from __future__ import annotations

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import ServerLog
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.http_app import create_http_app
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.journals.resumable_streams import ResumableStreams
from llmbackend.frontends.openai.router import create_openai_router
from llmbackend.frontends.openai.sealed_reasoning import sealing_key

from .frontend_server import FrontendServer
from .ports import ClaimedPorts
from .settings import ServerSettings


def make_frontends(
    server: InferenceServer,
    settings: ServerSettings,
    access: AccessControl,
    server_log: ServerLog,
    store: ResponseStore,
    claims: ClaimedPorts,
) -> FrontendServer:
    """Frontends that are ready to start, on the ports that were claimed."""
    limit_bytes = settings.http_max_input_size_bytes
    gate = InferenceGate(server, settings.limits.inference)
    streams = ResumableStreams(settings.store.resume_grace_s)
    key = sealing_key(settings.protocols.reasoning_secret)
    routers = (
        create_anthropic_router(
            server,
            settings.openai_max_input_size_bytes,
            gate,
            settings.protocols.openai_lora_separator,
            sealing_key=key,
        ),
        create_openai_router(
            server,
            settings.openai_max_input_size_bytes,
            gate,
            settings.protocols.openai_lora_separator,
            streams,
            store=store,
            sealing_key=key,
            lora_folder=settings.protocols.openai_lora_folder,
        ),
    )
    frontends = FrontendServer(
        server,
        http_address=settings.http.address,
        http_port=settings.http.port_or_none,
        grpc_address=settings.grpc.address,
        grpc_port=settings.grpc.port_or_none,
        metrics_address=settings.metrics.address,
        metrics_port=settings.metrics.port_or_none,
        http_reuse_port=settings.http.reuse_port,
        http_app=create_http_app(
            server,
            max_input_size_bytes=limit_bytes,
            routers=routers,
            gate=gate,
            options=settings.protocols,
            log=server_log,
            streams=streams,
        ),
        access=access,
        gate=gate,
        limits=settings.limits,
        protocols=settings.protocols,
        log=server_log,
        claims=claims,
    )
    frontends.bind()
    return frontends
