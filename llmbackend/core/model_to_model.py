"""The host as models use it: infer on another model, load and unload models, readiness.

For backends (methods of backend_api.Model) and the steps of ensembles. A request of a model is validated, queued,
counted and cancelled like a client's; it is also served while the server stops, so that the requests in flight that
need it can end. Source: TRITONSERVER_ServerInferAsync and its neighbours, as Triton's backends call them.
"""

from __future__ import annotations

from typing import Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from .messages import InferenceHandle, InferenceRequest, LoadParameters, ResponseCallback
from .requests.response_channel import RequestObserver


class ModelHandle(Protocol):
    """A READY model version, kept from being finalised until `leave`."""

    @property
    def config(self) -> ModelConfig:
        """A copy of the configuration as it is served."""

    @property
    def answers_decoupled(self) -> bool:
        """Whether a request may have any number of responses."""

    def enter(self) -> None:
        """Takes another handle, also while the model is being unloaded."""

    def infer(
        self, request: InferenceRequest, callback: ResponseCallback, observer: RequestObserver | None = None
    ) -> InferenceHandle:
        """Validates and enqueues. The request takes over one handle and gives it back when it is done or refused.
        Raises TritonError when refused; then neither callback nor observer is called."""

    def leave(self) -> None:
        """Gives one handle back."""


class ModelHost(Protocol):
    """The host as its models see it."""

    def acquire_model(self, name: str, version: int = -1) -> ModelHandle:
        """A handle on a READY model; -1 = the highest READY version. Raises TritonError NOT_FOUND or UNAVAILABLE with
        Triton's texts."""

    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None: ...
    def unload_model(self, name: str, unload_dependents: bool = False) -> None: ...
    def model_is_ready(self, name: str, version: int = -1) -> bool: ...
