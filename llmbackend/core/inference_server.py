"""The one door that frontends use.

For: frontends and the command line. Does not know: wire protocols, LLMs. Owner of the server's state and of every part
of the host. Invariants: no request is accepted unless the server is READY; after `stop` returned True no model, backend
or thread of the host is left. Source: Triton's in-process API and server.cc (reference §1.1, §1.6, §2.10, §2.11).
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto

from prometheus_client import CollectorRegistry
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput
from tritonclient.grpc.service_pb2 import ModelStatistics

from llmbackend import __version__

from .backend_manager import BackendManager
from .errors import TritonError, internal, invalid_argument, unavailable
from .messages import (
    InferenceHandle,
    InferenceRequest,
    LoadParameters,
    ModelIndex,
    ModelMetadata,
    ServerMetadata,
    ServerOptions,
    TensorMetadata,
)
from .metric_family import MetricFamilies
from .metrics import CpuMetrics, ModelMetrics
from .model import LoadedModel
from .model_lifecycle import UNLOADED, ModelLifecycle, ModelState
from .model_repository import ModelRepository, ModelSpec, check_model_name
from .reaper import Reaper
from .tensors import DATATYPE_OF_CONFIG_TYPE

log = logging.getLogger(__name__)

EXTENSIONS = (
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
"""Triton's names of the extensions that this host serves."""

EXPLICIT_ONLY = "explicit model load / unload is not allowed if polling is enabled"
ALL_MODELS = "*"


class ServerState(Enum):
    INVALID = auto()
    INITIALIZING = auto()
    READY = auto()
    EXITING = auto()
    FAILED_TO_INITIALIZE = auto()


class InferenceServer:
    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._state = ServerState.INVALID
        self._registry = CollectorRegistry(auto_describe=False)
        self._reaper = Reaper()
        self._backends = BackendManager(
            options.backend_directory,
            options.backend_config,
            options.auto_complete_config,
            MetricFamilies(self._registry),
        )
        self._repository = ModelRepository(options.model_repositories, options.auto_complete_config)
        self._lifecycle = ModelLifecycle(
            self._make_model, options.model_load_thread_count, options.model_load_retry_count
        )
        self._load_locks: dict[str, threading.Lock] = {}
        self._load_locks_guard = threading.Lock()
        self._registry.register(ModelMetrics(self._lifecycle.ready_models))
        self._registry.register(CpuMetrics())

    @property
    def metrics_registry(self) -> CollectorRegistry:
        return self._registry

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Loads the startup models; blocks until they are READY or failed.

        Raises TritonError when a startup model failed and options.exit_on_error; the server is stopped then.
        """
        self._state = ServerState.INITIALIZING
        self._reaper.start()
        try:
            self._repository.check()
            names = self._startup_models()
        except TritonError:
            self.stop(timeout_s=0.0)
            self._state = ServerState.FAILED_TO_INITIALIZE
            raise
        with ThreadPoolExecutor(max(len(names), 1), thread_name_prefix="startup") as pool:
            futures = [pool.submit(self._load, name, None) for name in names]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            log.error("%s", error)
        if errors and self._options.exit_on_error:
            self.stop(timeout_s=30.0)
            self._state = ServerState.FAILED_TO_INITIALIZE
            raise internal("failed to load all models")
        self._state = ServerState.READY

    def stop(self, timeout_s: float) -> bool:
        """Refuses new work, waits for in-flight inferences, unloads every model, finalises backends.

        False = time ran out; then models that still hold requests, and the backends, are left as they are.
        """
        self._state = ServerState.EXITING
        deadline_s = time.monotonic() + timeout_s
        log.info("Waiting for in-flight requests to complete.")
        if not self._drain(deadline_s):
            log.error("Exit timeout expired. Exiting immediately.")
            return False
        log.info("All models are stopped, unloading models")
        if not self._lifecycle.close(max(deadline_s - time.monotonic(), 0.0)):
            log.error("Exit timeout expired. Exiting immediately.")
            return False
        self._backends.close()
        self._reaper.stop()
        return True

    @property
    def is_exiting(self) -> bool:
        return self._state is ServerState.EXITING

    def is_live(self) -> bool:
        return self._state in (ServerState.READY, ServerState.EXITING)

    def is_ready(self) -> bool:
        """READY; with strict readiness also every known version READY or unloaded, and every instance ready."""
        if self._state is not ServerState.READY:
            return False
        if not self._options.strict_readiness:
            return True
        for name in self._lifecycle.names():
            versions = self._lifecycle.versions(name)
            if not versions:
                return False
            for number, (state, reason) in versions.items():
                if state is ModelState.READY:
                    if not self.model_is_ready(name, number):
                        return False
                elif (state, reason) != (ModelState.UNAVAILABLE, UNLOADED):
                    return False
        return True

    def model_is_ready(self, name: str, version: int = -1) -> bool:
        """False also for a model that is unknown or not loaded."""
        try:
            model = self._lifecycle.acquire(name, version)
        except TritonError:
            return False
        try:
            return model.is_ready()
        finally:
            model.in_flight.leave()

    # --- what is served ---------------------------------------------------------------------------------------------

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata(self._options.server_id, __version__, EXTENSIONS)

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        model = self._lifecycle.get(name, version)
        config = model.config
        versions = [model.version] if version >= 0 else [ready.version for ready in self._lifecycle.ready_models(name)]
        return ModelMetadata(
            name=name,
            versions=tuple(str(number) for number in versions),
            platform=config.platform or config.backend,
            inputs=tuple(_tensor_metadata(tensor, config.max_batch_size) for tensor in config.input),
            outputs=tuple(_tensor_metadata(tensor, config.max_batch_size) for tensor in config.output),
        )

    def model_config(self, name: str, version: int = -1) -> ModelConfig:
        return self._lifecycle.get(name, version).config

    def model_statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        """Of READY versions. Raises TritonError INVALID_ARG for a named model or version that is not READY."""
        models = self._lifecycle.ready_models(name)
        if name and not models:
            raise invalid_argument(f"requested model '{name}' is not available")
        if name and version >= 0:
            models = [model for model in models if model.version == version]
            if not models:
                raise invalid_argument(f"requested model version is not available for model '{name}'")
        return [model.statistics.snapshot(model.name, model.version) for model in models]

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        """Every model of the repositories with the state of its known versions, sorted by name."""
        rows: list[ModelIndex] = []
        for name, count in self._repository.names().items():
            versions = self._lifecycle.versions(name)
            if count > 1:
                reason = "model appears in two or more repositories"
                rows.append(ModelIndex(name, "", ModelState.UNAVAILABLE.value, reason))
            elif not versions:
                rows.append(ModelIndex(name))
            for number, (state, reason) in versions.items():
                rows.append(ModelIndex(name, str(number), state.value, reason))
        return [row for row in rows if not ready_only or row.state == ModelState.READY.value]

    # --- control ----------------------------------------------------------------------------------------------------

    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None:
        """Loads or reloads; blocks until done. A loaded model whose files did not change is left alone.

        Raises TritonError: UNAVAILABLE in mode none, INTERNAL when it can not be polled, INVALID_ARG when it fails.
        """
        self._check_explicit()
        self._load(name, parameters)

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload; requests in flight run to their end. `unload_dependents` matters to ensembles only."""
        self._check_explicit()
        check_model_name(name)
        self._lifecycle.unload(name)

    # --- inference --------------------------------------------------------------------------------------------------

    def infer_async(self, request: InferenceRequest) -> InferenceHandle:
        """Validates and enqueues. Raises TritonError when refused synchronously (then the callback is never called)."""
        self._check_serving()
        model = self._lifecycle.acquire(request.model_name, request.model_version)
        return model.infer(request)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _make_model(self, spec: ModelSpec, version: int) -> LoadedModel:
        version_directory = spec.directory / str(version)
        backend = self._backends.get(spec.config.backend, spec.name, version_directory, spec.config.runtime)
        model = LoadedModel(spec, version, backend, self._reaper, self._options.auto_complete_config)
        model.load()
        return model

    def _load(self, name: str, parameters: LoadParameters | None) -> None:
        with self._load_locks_guard:
            lock = self._load_locks.setdefault(name, threading.Lock())
        with lock:
            spec = self._repository.poll(name, parameters)
            loaded = self._lifecycle.loaded_spec(name)
            if loaded is not None and not spec.has_override and loaded.signature == spec.signature:
                return
            self._lifecycle.load(spec)

    def _startup_models(self) -> list[str]:
        if self._options.model_control_mode == "none":
            return list(self._repository.names())
        names = list(dict.fromkeys(self._options.startup_models))
        if ALL_MODELS not in names:
            return names
        if len(names) > 1:
            raise invalid_argument("Wildcard model name '*' must be the ONLY startup model if specified at all.")
        return list(self._repository.names())

    def _check_serving(self) -> None:
        if self._state is not ServerState.READY:
            raise unavailable("Server is stopping" if self.is_exiting else "Server is not ready")

    def _check_explicit(self) -> None:
        if self._options.model_control_mode != "explicit":
            raise unavailable(EXPLICIT_ONLY)
        self._check_serving()

    def _drain(self, deadline_s: float) -> bool:
        """Waits for every in-flight request, with a line of log each second. False at the deadline."""
        while True:
            busy = [model for model in self._lifecycle.live_models() if model.in_flight.count]
            left_s = deadline_s - time.monotonic()
            log.info("Timeout %d: Found %d model versions that have in-flight inferences", max(left_s, 0), len(busy))
            for model in busy:
                count = model.in_flight.count
                log.info("Model '%s' (version %d) has %d in-flight inferences", model.name, model.version, count)
            if not busy:
                return True
            if left_s <= 0:
                return False
            busy[0].in_flight.wait_for_zero(min(left_s, 1.0))


def _tensor_metadata(tensor: ModelInput | ModelOutput, max_batch_size: int) -> TensorMetadata:
    shape = (-1, *tensor.dims) if max_batch_size > 0 else tuple(tensor.dims)
    return TensorMetadata(tensor.name, DATATYPE_OF_CONFIG_TYPE[DataType.Name(tensor.data_type)], shape)
