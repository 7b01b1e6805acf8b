"""The endpoints of a frontend process: inference APIs are served here, everything else is forwarded to the host.

Used by frontend_process.py, which sets up its log before it imports this module (that takes half a second). Independent
of its parent and of models. Invariant: it has no state that another process needs.
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
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.generation.models import ADAPTERS_FAMILY, MAX_MODEL_LEN_FAMILY
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
from .ports import Endpoint


class KeyedRemoteServer(RemoteServer):
    """Counts requests by API key, like KeyedServer."""

    metrics_registry: CollectorRegistry

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        return super().infer_async(*of_key(self, request, callback))

    async def infer_accepted(
        self, request: InferenceRequest, callback: ResponseCallback, in_thread: InThread | None = None
    ) -> InferenceHandle:
        return await super().infer_accepted(*of_key(self, request, callback), in_thread)


_HOST_TIMEOUT_S: Final = 30.0
"""Timeout for the host's first answer."""
_FAMILIES: Final = (KV_CACHE_FAMILY, ADAPTERS_FAMILY, MAX_MODEL_LEN_FAMILY)
"""The host's metrics that frontends read."""


class FrontendEndpoints:
    """Created and used on the event loop."""

    def __init__(self, settings: FrontendSettings) -> None:
        host, protocols = settings.host, settings.protocols
        counts = SharedCounts(host.counts, settings.number)
        self._access = AccessControl(settings.access, counts)
        self._server = KeyedRemoteServer(
            (host.requests,), name=settings.name, keys=settings.keys, metric_families=_FAMILIES
        )
        self._server.metrics_registry = CollectorRegistry(auto_describe=False)
        context = FrontendContext.of(
            self._server,
            gate=InferenceGate(self._server, settings.limits.inference, counts),
            access=self._access,
            limits=settings.limits,
            options=replace(protocols, grpc_reuse_port=True),
            max_input_size_bytes=settings.http_max_input_size_bytes,
            max_body_bytes=settings.openai_max_input_size_bytes,
        )
        routers = (create_anthropic_router(context), create_openai_router(context))
        self._endpoints = FrontendServer(
            context,
            create_inference_app(context, routers),
            http=replace(settings.http, reuse_port=True),
            grpc=settings.grpc,
            metrics=Endpoint("", 0, enabled=False),
            edge=FrontendEdge(host.http, host.grpc, WEBSOCKET_PATH if settings.has_pages else ""),
            counts=counts,
        )

    async def start(self) -> None:
        """Attaches to the host, then listens. Raises TritonError, OSError or RuntimeError."""
        await self._server.start(_HOST_TIMEOUT_S)
        await self._endpoints.start()

    def reload(self) -> None:
        """Rereads API keys and certificates."""
        self._access.reload()

    async def leave(self) -> None:
        """gRPC refuses new connections and calls. Those in progress continue until `stop`."""
        await self._endpoints.leave()

    async def stop(self, grace_s: float) -> None:
        """Refuses new work. Work in progress gets `grace_s` seconds to finish."""
        await self._endpoints.stop(grace_s)
        self._server.close()
