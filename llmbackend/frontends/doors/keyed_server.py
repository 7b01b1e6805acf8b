"""The host as the holders of API keys see it: each request is its key's, and is counted to it.

For: whoever serves with API keys; frontends use it as any InferenceServer. Does not know: protocols, keys themselves.
Invariants: every request that comes by a protocol has its key's tenant, whatever the client sends; a request whose
visit is not known, which the process itself makes, passes untouched.
"""

from __future__ import annotations

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceHandle, InferenceRequest
from llmbackend.core.tenants import Tenant
from llmbackend.frontends.limits import LimitReachedError

from .metering import counted, counts_tokens
from .visit import VISIT


class KeyedServer(InferenceServer):
    def infer_async(self, request: InferenceRequest) -> InferenceHandle:
        """As InferenceServer's; also raises LimitReachedError when the key has not as many prompts left."""
        visit = VISIT.get()
        if visit is None:
            return super().infer_async(request)
        request.tenant = visit.account.tenant
        description = self._model(request.model_name, request.model_version).description
        refusal = visit.spend(_prompts(request, description.batches))
        if refusal is not None:
            raise LimitReachedError(refusal.message, refusal.retry_after, refusal.kind)
        names = [tensor.name for tensor in description.inputs]
        if request.raw_input is not None or not counts_tokens(names):
            return super().infer_async(request)
        return super().infer_async(counted(request, visit, description.batches))

    def cancel_requests(
        self, model_name: str, version: int = -1, request_id: str = "", by: Tenant | None = None
    ) -> int:
        """As InferenceServer's, for the key that asks."""
        visit = VISIT.get()
        return super().cancel_requests(model_name, version, request_id, by if visit is None else visit.account.tenant)


def _prompts(request: InferenceRequest, batches: bool) -> int:
    """How many the request counts as: the rows of its batch. A wrong shape is for the host to refuse."""
    if not batches or not request.inputs:
        return 1
    shape = request.inputs[0].shape
    return max(shape[0], 1) if shape else 1
