"""The host in another process, as the holders of API keys see it: KeyedServer's rules in a frontend process.

For: frontend processes; their frontends use it as any host. Does not know: protocols, the keys themselves. Invariant: a
request has its key's tenant, limits and token counters, which all processes of the machine share; the host decides
nothing about it again.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from llmbackend.core.host_protocol import InThread
from llmbackend.core.messages import InferenceHandle, InferenceRequest, ResponseCallback
from llmbackend.frontends.access.keyed_server import of_key
from llmbackend.remote.remote_server import RemoteServer


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
