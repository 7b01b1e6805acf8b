"""The one door that frontends use. (Signatures agreed first; the bodies follow.)"""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatistics

from .messages import (
    InferenceHandle,
    InferenceRequest,
    LoadParameters,
    ModelIndex,
    ModelMetadata,
    ServerMetadata,
    ServerOptions,
)


class InferenceServer:
    def __init__(self, options: ServerOptions) -> None: ...

    @property
    def metrics_registry(self) -> CollectorRegistry: ...

    def start(self) -> None:
        """Loads the startup models; blocks until they are READY or failed.

        Raises TritonError when a startup model failed and options.exit_on_error.
        """

    def stop(self, timeout_s: float) -> bool:
        """Refuses new work, waits for in-flight inferences, unloads every model, finalises backends. False = time ran out."""

    @property
    def is_exiting(self) -> bool: ...
    def is_live(self) -> bool: ...
    def is_ready(self) -> bool: ...
    def model_is_ready(self, name: str, version: int = -1) -> bool: ...
    def server_metadata(self) -> ServerMetadata: ...
    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata: ...
    def model_config(self, name: str, version: int = -1) -> ModelConfig: ...
    def model_statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]: ...
    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]: ...
    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None: ...
    def unload_model(self, name: str, unload_dependents: bool = False) -> None: ...
    def infer_async(self, request: InferenceRequest) -> InferenceHandle:
        """Validates and enqueues. Raises TritonError when refused synchronously (then the callback is never called)."""
