"""The host as models see it: inference on other models, loading and unloading models, readiness.

Used by backends (methods of backend_api.Model) and by the steps of ensembles. A model's request is validated, queued,
counted and cancelled like a client's. It is served even while the server is stopping, so that the requests in flight
that depend on it can finish. Source: TRITONSERVER_ServerInferAsync and its neighbours, as called by Triton's backends.
"""

from __future__ import annotations

from typing import Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from .messages import InferenceHandle, InferenceRequest, LoadParameters, ResponseCallback
from .requests.response_channel import RequestObserver


class ModelHandle(Protocol):
    """Keeps a READY model version from being finalised until `leave`."""

    @property
    def config(self) -> ModelConfig:
        """A copy of the configuration being served."""

    @property
    def answers_decoupled(self) -> bool:
        """Whether a request may have any number of responses."""

    def enter(self) -> None:
        """Takes another handle, even while the model is being unloaded."""

    def infer(
        self, request: InferenceRequest, callback: ResponseCallback, observer: RequestObserver | None = None
    ) -> InferenceHandle:
        """Validates and enqueues a request. The request takes over one handle and returns it when it is finished or
        refused. Raises TritonError if refused; then neither callback nor observer is called."""

    def leave(self) -> None:
        """Returns one handle."""


class ModelHost(Protocol):
    """The host as seen by its models."""

    def acquire_model(self, name: str, version: int = -1) -> ModelHandle:
        """Takes a handle on a READY model; -1 = the highest READY version. Raises TritonError NOT_FOUND or UNAVAILABLE
        with Triton's texts."""

    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None: ...
    def unload_model(self, name: str, unload_dependents: bool = False) -> None: ...
    def model_is_ready(self, name: str, version: int = -1) -> bool: ...
