"""What a frontend process serves: its own requests, and the host's application behind them.

For: frontend_process.py, which imports this module once its log is there: what it imports takes half a second. Does not
know: its parent, models. Invariant: it keeps nothing that another process would have to know.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from prometheus_client import CollectorRegistry

from llmbackend.core.host_protocol import InThread
from llmbackend.core.messages import InferenceHandle, InferenceRequest, ResponseCallback
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.keyed_server import of_key
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.generation.models import ADAPTERS_FAMILY, MAX_MODEL_LEN_FAMILY
from llmbackend.frontends.generation.sealed_reasoning import sealing_key
from llmbackend.frontends.host_forwarding import FrontendEdge
from llmbackend.frontends.http_app import create_inference_app
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.openai.router import create_openai_router
from llmbackend.frontends.operations.probes import KV_CACHE_FAMILY
from llmbackend.frontends.page_proxy import WEBSOCKET_PATH
from llmbackend.frontends.shared_counts import SharedCounts
from llmbackend.remote.remote_server import RemoteServer

from .frontend_server import FrontendServer
from .frontend_settings import FrontendSettings


class KeyedRemoteServer(RemoteServer):
    """Without keys, requests are sent as they are."""

    metrics_registry: CollectorRegistry

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        """As KeyedServer's."""
        return super().infer_async(*of_key(self, request, callback))

    async def infer_accepted(
        self, request: InferenceRequest, callback: ResponseCallback, in_thread: InThread | None = None
    ) -> InferenceHandle:
        """As KeyedServer's `infer_async`."""
        return await super().infer_accepted(*of_key(self, request, callback), in_thread)


_HOST_TIMEOUT_S: Final = 30.0
"""Until the host must have answered."""
_FAMILIES: Final = (KV_CACHE_FAMILY, ADAPTERS_FAMILY, MAX_MODEL_LEN_FAMILY)
"""Of the host's metrics that frontends look at."""


class FrontendEndpoints:
    def __init__(self, settings: FrontendSettings) -> None:
        """On the event loop."""
        host, protocols = settings.host, settings.protocols
        counts = SharedCounts(host.counts, settings.number)
        self._access = AccessControl(settings.access, counts)
        hosts = (host.requests, *settings.peers)
        self._server = KeyedRemoteServer(hosts, name=settings.name, keys=settings.keys, metric_families=_FAMILIES)
        self._server.metrics_registry = CollectorRegistry(auto_describe=False)
        gate = InferenceGate(self._server, settings.limits.inference, counts)
        openai = (self._server, settings.openai_max_input_size_bytes, gate, protocols.openai_lora_separator)
        key = sealing_key(protocols.reasoning_secret)
        self._endpoints = FrontendServer(
            self._server,
            http_address=settings.http.address,
            http_port=settings.http.port_or_none,
            grpc_address=settings.grpc.address,
            grpc_port=settings.grpc.port_or_none,
            metrics_port=None,
            http_reuse_port=True,
            http_app=create_inference_app(
                gate,
                max_input_size_bytes=settings.http_max_input_size_bytes,
                routers=(
                    create_anthropic_router(*openai, sealing_key=key),
                    create_openai_router(
                        *openai,
                        sealing_key=key,
                        fingerprint=protocols.openai_fingerprint,
                        defaults=protocols.request_defaults,
                    ),
                ),
                options=protocols,
            ),
            access=self._access,
            gate=gate,
            limits=settings.limits,
            protocols=replace(protocols, grpc_reuse_port=True),
            edge=FrontendEdge(host.http, host.grpc, WEBSOCKET_PATH if settings.has_pages else ""),
            counts=counts,
        )

    async def start(self) -> None:
        """Attaches to the host, then listens. Raises TritonError, OSError or RuntimeError."""
        await self._server.start(_HOST_TIMEOUT_S)
        await self._endpoints.start()

    def reload(self) -> None:
        """Reads API keys and certificates again."""
        self._access.reload()

    async def leave(self) -> None:
        """gRPC accepts nothing more; what runs continues until `stop`."""
        await self._endpoints.leave()

    async def stop(self, grace_s: float) -> None:
        """Accepts nothing more, and gives what runs `grace_s` seconds."""
        await self._endpoints.stop(grace_s)
        self._server.close()
