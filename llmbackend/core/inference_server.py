"""InferenceServer: the whole host behind one object, for frontends and (as ModelHost) for models.

Invariants: a request is accepted only while the server is READY, or while it exits if the request continues a sequence
or comes from a model; once `stop` has returned True, no model, backend or thread of the host is left. Source: Triton's
in-process API and server.cc.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from enum import Enum, auto
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatistics

from llmbackend import __version__
from llmbackend.waiting.thread_pool import ThreadPool

from .activity.hub import Source, Viewer
from .activity.messages import EventKind, InstanceDescription, LogActivity
from .backend_manager import BackendManager
from .errors import StartupError, TritonError, internal, not_found, shown_name, unavailable
from .host_protocol import InThread
from .host_services import HostServices
from .lifecycle.model_lifecycle import cut_off, wait_until_drained
from .lifecycle.model_loading import ModelLoader, RepositoryPoller
from .lifecycle.model_versions import STOPPING
from .messages import (
    InferenceHandle,
    InferenceRequest,
    LoadParameters,
    ModelIndex,
    ModelMetadata,
    ResponseCallback,
    ServerMetadata,
    Tenant,
)
from .metrics.metric_family import MetricFamilies
from .metrics.nv_metrics import register_host_metrics, register_metrics
from .models.model import LoadedModel
from .models.served_config import Description
from .served_models import ModelTable, ServedModels, log_summary
from .server_log import LogLine
from .server_options import ServerOptions
from .shared_memory import SharedMemoryManager
from .tracing.manager import TraceManager

log = logging.getLogger(__name__)

CONTROL_THREADS = 8
"""Concurrent load requests, including those that wait for another load of their model."""
EXPLICIT_ONLY = "explicit model load / unload is not allowed if polling is enabled"
EXTENSIONS = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)", "schedule_policy",
    "model_configuration", "system_shared_memory", "cuda_shared_memory", "binary_tensor_data", "parameters",
    "statistics", "trace", "logging",
)  # fmt: skip
"""Protocol extensions that this host serves."""
UNLOAD_GRACE_S = 8.0
"""Minimum time for unloading, however long requests took: an engine that hangs is killed after 5 s."""


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
        self._state_lock = threading.Lock()
        self._lacks_repository = False
        self.metrics_registry = CollectorRegistry(auto_describe=False)
        self.shared_memory = SharedMemoryManager(options.allow_client_shm)
        self.tracing = TraceManager(options.trace)
        self._families = MetricFamilies(self.metrics_registry)
        self._services = HostServices.create(options, self, self.metrics_registry, self._families)
        self._backends = BackendManager(
            options.backend_directory, options.backend_config, options.auto_complete_config, self._families
        )
        self._loader = ModelLoader(options, self._backends, self._services)
        self._versions = self._loader.lifecycle.versions
        self._models = ServedModels(self._versions, self._loader.names, self._loader.repository)
        self._poller = RepositoryPoller(self._loader, options.repository_poll_secs)
        self._control = ThreadPool(CONTROL_THREADS, thread_name_prefix="control")
        register_metrics(self.metrics_registry, self._versions.ready_models, options.metrics)
        register_host_metrics(self.metrics_registry, self._models.readinesses)

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Loads the startup models; blocks until they are READY or have failed.

        With options.exit_on_error, raises StartupError if a startup model failed, and another TritonError if the server
        itself cannot start; the server is then stopped. Otherwise it serves the remaining models; as in Triton, it is
        neither live nor ready if a repository cannot be read.
        """
        self._state = ServerState.INITIALIZING
        try:
            self._services.start()
            self.tracing.start()
            self._exclude_repositories()
            names = self._loader.startup_models()
            errors = self._loader.load_together(dict.fromkeys(names))
        except TritonError:
            self._fail_to_start(timeout_s=0.0)
            raise
        except RuntimeError as shortage:  # no thread can be started
            self._fail_to_start(timeout_s=0.0)
            raise internal(f"the server cannot start: {shortage}") from shortage
        if self.is_exiting:
            raise unavailable(STOPPING)
        for error in errors.values():
            log.error("%s", error)
        log_summary(self._loader.agents.table(), self._backends.table(), self._versions)
        if errors and self._options.exit_on_error:
            self._fail_to_start(timeout_s=30.0)
            raise StartupError(errors)
        with self._state_lock:
            if not self.is_exiting:
                self._state = ServerState.READY
        if self._options.model_control_mode == "poll" and self._options.repository_poll_secs:
            self._poller.start()

    def _exclude_repositories(self) -> None:
        """Raises TritonError INTERNAL if options.exit_on_error is set."""
        for error in self._loader.repository.exclude_unreadable():
            if self._options.exit_on_error:
                raise error
            log.error("%s", error)
            self._lacks_repository = True

    def stop(self, timeout_s: float) -> bool:
        """Refuses new requests, waits up to `timeout_s` for those in flight, cuts off the others, unloads all models
        and finalises backends. May be called from any thread, during `start`, and repeatedly.

        Returns False if requests were cut off or a model did not unload; backends are then not finalised.
        """
        with self._state_lock:
            self._state = ServerState.EXITING
        self._poller.stop()
        self._versions.refuse_loads()
        self._control.shutdown(wait=False)
        deadline_s = time.monotonic() + timeout_s
        log.info("Waiting for in-flight requests to complete.")
        is_drained = wait_until_drained(self._versions, deadline_s)
        if is_drained:
            log.info("All models are stopped, unloading models")
        else:
            log.error("Exit timeout expired. Exiting immediately.")
            cut_off(self._versions.live_models())
        is_unloaded = self._loader.lifecycle.close(max(deadline_s - time.monotonic(), UNLOAD_GRACE_S))
        self._loader.repository.close()
        self.shared_memory.close()
        self.tracing.close()
        if not is_unloaded:
            left = {what: count for what, count in self._versions.leaked_resources().items() if count}
            log.error("Models could not be unloaded: %s", ", ".join(f"{count} {what}" for what, count in left.items()))
            return False
        self._poller.join()
        self._backends.close()
        self._services.stop()
        return is_drained

    def is_live(self) -> bool:
        return self._state in (ServerState.READY, ServerState.EXITING) and not self._lacks_repository

    def is_ready(self) -> bool:
        """Whether the server is READY and, with strict readiness, every known version is READY or unloaded and every
        instance is ready. Returns within seconds even if a backend hangs."""
        if self._state is not ServerState.READY or self._lacks_repository:
            return False
        return not self._options.strict_readiness or self._models.all_are_ready()

    @property
    def is_exiting(self) -> bool:
        return self._state is ServerState.EXITING

    def forecasts(self) -> dict[tuple[str, int], Mapping[str, Any]]:
        """LoadedModel.forecast by name and version; requires options.starts_instances to be False."""
        return {(model.name, model.version): model.forecast for model in self._versions.ready_models()}

    def check(self) -> list[str]:
        """Describes each resource leak in one sentence. To be called while no request runs and no model is loading or
        unloading. (Each model version also checks itself whenever it becomes idle.)"""
        found = []
        models = self._versions.live_models()
        for model in models:
            left = {"in-flight inferences": model.in_flight.count, **model.leaked_resources()}
            found += _leaks(f"model '{model.name}' version {model.version}", left)
        timers = max(len(self._services.timer) - len(models), 0)  # a queue may have one
        left = {
            **self._loader.leaked_resources(),
            **self.shared_memory.leaked_resources(),
            **self._services.rate_limiter.leaked_resources(),
            "actions for its reaper": self._services.reaper.backlog,
            "traces that are not complete": self.tracing.open_count,
        }
        return found + _leaks("the server", {**left, "timers without a model": timers})

    def _fail_to_start(self, timeout_s: float) -> None:
        self.stop(timeout_s)
        self._state = ServerState.FAILED_TO_INITIALIZE

    def _check_serving(self) -> None:
        if self._state is not ServerState.READY:
            raise unavailable(STOPPING if self.is_exiting else "Server is not ready")

    # --- inference --------------------------------------------------------------------------------------------------

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        """Validates and enqueues a request. While the server exits, requests of open sequences are still accepted.
        Raises TritonError if the request is refused; then `callback` is never called."""
        if not (self.is_exiting and self._continues_sequence(request)):
            self._check_serving()
        if request.shared_inputs:
            request = self.shared_memory.with_inputs(request)
        if request.shared_outputs:
            return self.shared_memory.submit_with_outputs(
                request.shared_outputs, callback, partial(self._infer, request)
            )
        return self._infer(request, callback)

    async def infer_accepted(
        self, request: InferenceRequest, callback: ResponseCallback, in_thread: InThread | None = None
    ) -> InferenceHandle:
        """`infer_async`, on another thread if `in_thread`: see Host."""
        if in_thread is None:
            return self.infer_async(request, callback)
        handle: InferenceHandle = await in_thread(partial(self.infer_async, request, callback))
        return handle

    def acquire_model(self, name: str, version: int = -1) -> LoadedModel:
        """A READY model for a request from another model, even while the server exits: see ModelHost."""
        return self._versions.acquire(self._loader.names.key(name), version)

    def cancel_requests(
        self, model_name: str, version: int = -1, request_id: str = "", by: Tenant | None = None
    ) -> int:
        """Cancels all live requests of the model with that client id; returns how many. Version -1 = all versions,
        including draining ones. The empty id matches nothing. by: only requests that this tenant may end.

        Raises TritonError as `infer_async` does for a model or version that is unknown and has no requests.
        """
        channels = [
            channel
            for model in self._models.live_versions(model_name, version)
            for channel in model.live_requests.with_id(request_id)
            if not channel.is_final and (by is None or by.may_end(channel.tenant))
        ]
        for channel in channels:
            channel.cancel()
        return len(channels)

    def cancel_request(self, number: int, by: Tenant | None = None) -> None:
        """Cancels the live request with this number (ResponseChannel.number). by: only if this tenant may end it.
        Raises TritonError NOT_FOUND if there is none."""
        for model in self._versions.live_models():
            for channel in model.live_requests.all():
                if channel.number == number and not channel.is_final and (by is None or by.may_end(channel.tenant)):
                    channel.cancel()
                    return
        raise not_found(f"request {number} is not in flight")

    def kill_instance(self, model_name: str, version: int, instance_name: str) -> list[int]:
        """Kills the processes of the model's instances with that name (LLMBACKEND_ModelInstanceKill). Returns the ids.

        Raises TritonError: NOT_FOUND for an unknown instance, UNSUPPORTED if the backend's instances have no processes,
        UNAVAILABLE if there is no process at present.
        """
        model = self._models.get(model_name, version)
        named = [instance for instance in model.instances if instance.name == instance_name]
        if not named:
            known = ", ".join(sorted({instance.name for instance in model.instances})) or "none"
            raise not_found(
                f"model '{model.name}' has no instance '{shown_name(instance_name)}', its instances are {known}"
            )
        return [instance.kill() for instance in named]

    def _infer(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        return self.acquire_model(request.model_name, request.model_version).infer(request, callback)

    def _continues_sequence(self, request: InferenceRequest) -> bool:
        try:
            sequences = self._models.get(request.model_name, request.model_version).sequences
        except TritonError:
            return False
        return sequences is not None and sequences.continues(request.correlation_id, request.flags, request.tenant)

    # --- watching ---------------------------------------------------------------------------------------------------

    def watch(self, kinds: frozenset[EventKind], wake: Callable[[], None], by: Tenant | None = None) -> Viewer:
        """Opens a viewer of the server's activity. by: the viewer sees only what this tenant may see. wake: see Viewer.
        Raises TritonError UNAVAILABLE if there are too many viewers, or the server has stopped."""
        key_name = None if by is None or by.is_operator else by.key_name
        return self._services.activity.open(kinds, key_name, wake)

    def report_log(self, line: LogLine) -> None:
        """Shows a log line to viewers. Thread-safe; never blocks."""
        self._services.activity.report(Source(), LogActivity(time=line.time, level=line.level, text=line.text))

    def describe_instances(self) -> list[tuple[Source, InstanceDescription]]:
        """All instances and their requests. Takes time proportional to the number of requests."""
        return self._services.activity.describe()

    # --- model control ----------------------------------------------------------------------------------------------

    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None:
        """Loads or reloads; blocks until done. A loaded model whose files have not changed is left alone.

        Raises TritonError: UNAVAILABLE unless the model control mode is explicit, INTERNAL if the model cannot be
        polled, INVALID_ARG if the load fails.
        """
        self._check_explicit()
        self._loader.load(name, parameters)

    def start_load(self, name: str, parameters: LoadParameters | None = None) -> Future[None]:
        """`load_model` on a load thread, so that a slow load does not block other calls."""
        self._check_explicit()
        try:
            return self._control.submit(self.load_model, name, parameters)
        except RuntimeError as error:  # stopped meanwhile, or no thread can be started
            raise unavailable(STOPPING if self.is_exiting else f"the load cannot begin now: {error}") from None

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload a model and the ensembles that use it; requests in flight are finished. unload_dependents:
        also unload composing models that nothing else needs. Raises TritonError UNAVAILABLE unless the model control
        mode is explicit."""
        self._check_explicit()
        self._loader.unload(name, unload_dependents)

    def _check_explicit(self) -> None:
        if self._options.model_control_mode != "explicit":
            raise unavailable(EXPLICIT_ONLY)
        self._check_serving()

    # --- descriptions: see ServedModels -----------------------------------------------------------------------------

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata(self._options.server_id, __version__, EXTENSIONS)

    def metric_samples(self, name: str) -> list[Sample]:
        return self._families.samples(name)

    def model_is_ready(self, name: str, version: int = -1) -> bool:
        return self._models.is_ready(name, version)

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        return self._models.metadata(name, version)

    def model_description(self, name: str, version: int = -1) -> Description:
        return self._models.get(name, version).description

    def model_parameters(self, name: str, version: int = -1) -> Mapping[str, str]:
        return self._models.get(name, version).description.parameters

    def model_config(self, name: str, version: int = -1) -> ModelConfig:
        """A copy, which takes time to make; the other methods read the Description."""
        return self._models.get(name, version).config

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        return self._models.get(name, version).answers_decoupled

    def model_table(self) -> ModelTable:
        return self._models.table()

    def model_statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        return self._models.statistics(name, version)

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        return self._models.repository_index(ready_only)


def _leaks(subject: str, counts: Mapping[str, int]) -> list[str]:
    return [f"{subject} is idle, but has {count} {what}" for what, count in counts.items() if count]
