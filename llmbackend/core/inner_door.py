"""What a model may ask of the host it runs in: infer on another model, load, unload, ask for readiness.

For: backends (as methods of their Model), and ensembles, whose steps are such requests. Does not know: what a request
is for. Invariants: an inner request is validated, queued, counted and cancelled as a client's; it is also served while
the server stops, so that the requests in flight that need it can end.
Source: TRITONSERVER_ServerInferAsync and its neighbours as a Triton backend calls them (python_backend's BLS).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from .backend_api import InnerCallback, InnerRequest
from .backend_api import RequestTrace as TraceOfRequest
from .messages import InferenceHandle, InferenceRequest, LoadParameters
from .tracing.trace import RequestTrace, child_of

if TYPE_CHECKING:
    from .models.model import LoadedModel


class ModelHost(Protocol):
    """What the host gives to the models inside of it."""

    def acquire_model(self, name: str, version: int = -1) -> LoadedModel:
        """A READY model, kept from being finalised until its `leave`. -1 = the highest READY version.

        Raises TritonError NOT_FOUND or UNAVAILABLE with Triton's texts.
        """

    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None: ...
    def unload_model(self, name: str, unload_dependents: bool = False) -> None: ...
    def model_is_ready(self, name: str, version: int = -1) -> bool: ...


class InnerDoor:
    """The methods of backend_api.Model that reach other models."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    def infer_async(self, request: InnerRequest, callback: InnerCallback) -> InferenceHandle:
        message = InferenceRequest(
            model_name=request.model_name,
            response_callback=callback,
            model_version=request.model_version,
            id=request.id,
            inputs=tuple(request.inputs),
            requested_outputs=tuple(request.requested_outputs),
            parameters=request.parameters,
            correlation_id=request.correlation_id,
            flags=request.flags,
            priority=request.priority,
            timeout_us=request.timeout_us,
            trace=_child_of(request.trace),
            tenant=request.tenant,
        )
        return self._host.acquire_model(request.model_name, request.model_version).infer(message)

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        model = self._host.acquire_model(name, version)
        try:
            return model.answers_decoupled
        finally:
            model.leave()

    def is_model_ready(self, name: str, version: int = -1) -> bool:
        return self._host.model_is_ready(name, version)

    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None:
        self._host.load_model(name, parameters)

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self._host.unload_model(name, unload_dependents)


def _child_of(trace: TraceOfRequest | None) -> RequestTrace | None:
    assert trace is None or isinstance(trace, RequestTrace), "a trace comes from a request of this host"
    return child_of(trace)
