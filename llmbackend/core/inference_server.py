"""The one door that frontends use.

For: frontends and the command line. Does not know: wire protocols, LLMs. Owner of the server's state and of every part
of the host. Invariants: no request is accepted unless the server is READY; after `stop` returned True no model, backend
or thread of the host is left. Source: Triton's in-process API and server.cc (reference §1.1, §1.6, §2.10, §2.11).
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelStatistics

from llmbackend import __version__
from llmbackend.waiting.timer import Timer

from .backend_manager import BackendManager
from .caching.cache_slot import CacheSlot
from .conservation import BreachLog, breaches_of
from .descriptions import EXTENSIONS, describe
from .errors import TritonError, internal, invalid_argument, unavailable
from .host_services import HostGpus, HostServices
from .lifecycle.draining import cut, wait_until_drained
from .lifecycle.model_lifecycle import STOPPING
from .lifecycle.model_loading import ModelLoader
from .lifecycle.model_versions import UNLOADED, ModelState
from .lifecycle.repository_polling import RepositoryPoller
from .memory.shared_memory import SharedMemory
from .messages import (
    InferenceHandle,
    InferenceRequest,
    LoadParameters,
    ModelIndex,
    ModelMetadata,
    ServerMetadata,
    ServerOptions,
)
from .metrics.metric_family import MetricFamilies
from .metrics.metrics import register_metrics
from .models.model import LoadedModel
from .repository.model_repository import DUPLICATE
from .requests.reaper import Reaper
from .scheduling.rate_limiter import RateLimiter
from .startup_tables import log_tables
from .tracing.manager import TraceManager

log = logging.getLogger(__name__)

EXPLICIT_ONLY = "explicit model load / unload is not allowed if polling is enabled"
CONTROL_THREADS = 8
"""Load requests that run or wait for another load of their model; more than these wait."""
UNLOAD_GRACE_S = 8.0
"""What unloading gets at the least, however long requests took: an engine that hangs is killed after 5 s."""


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
        self._registry = CollectorRegistry(auto_describe=False)
        families = self._families = MetricFamilies(self._registry)
        self._services = HostServices(
            Reaper(),
            Timer(),
            BreachLog(families),
            options.metrics,
            self,
            CacheSlot(options.cache_config, self._registry),
            RateLimiter(options.rate_limit, options.rate_limit_resources),
            HostGpus.find(options.backend_config),
        )
        self._shared_memory = SharedMemory(options.allow_client_shm)
        self._backends = BackendManager(
            options.backend_directory, options.backend_config, options.auto_complete_config, families
        )
        self._loader = ModelLoader(options, self._backends, self._services)
        self._repository = self._loader.repository
        self._lifecycle = self._loader.lifecycle
        self._poller = RepositoryPoller(self._loader, options.repository_poll_secs)
        self._control = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="control")
        register_metrics(self._registry, self._lifecycle.ready_models, options.metrics)
        self.tracing = TraceManager(options.trace)

    @property
    def metrics_registry(self) -> CollectorRegistry:
        return self._registry

    @property
    def shared_memory(self) -> SharedMemory:
        return self._shared_memory

    def metric_samples(self, name: str) -> list[Sample]:
        """What backends report now in the family of that name; [] for one that nobody has made."""
        return self._families.samples(name)

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Loads the startup models; blocks until they are READY or failed.

        Raises TritonError when a startup model failed and options.exit_on_error; the server is stopped then.
        """
        self._state = ServerState.INITIALIZING
        try:
            self._services.start()
            self.tracing.start()
            self._repository.check()
            names = self._loader.startup_models()
        except TritonError:
            self._fail_to_start(timeout_s=0.0)
            raise
        errors = self._loader.load_together(dict.fromkeys(names))
        if self.is_exiting:
            raise unavailable(STOPPING)
        for error in errors.values():
            log.error("%s", error)
        self._log_tables()
        if errors and self._options.exit_on_error:
            self._fail_to_start(timeout_s=30.0)
            raise internal("failed to load all models")
        with self._state_lock:
            if not self.is_exiting:
                self._state = ServerState.READY
        if self._options.model_control_mode == "poll" and self._options.repository_poll_secs:
            self._poller.start()

    def stop(self, timeout_s: float) -> bool:
        """Refuses new work, waits for in-flight requests, cuts off those that run longer, unloads every model and
        finalises backends. Any thread; may be called while `start` still loads, and again.

        False = something was cut off, or a model did not end; then backends that are left are not finalised.
        """
        with self._state_lock:
            self._state = ServerState.EXITING
        self._poller.stop()
        self._lifecycle.refuse_loads()
        self._control.shutdown(wait=False)
        deadline_s = time.monotonic() + timeout_s
        log.info("Waiting for in-flight requests to complete.")
        is_drained = wait_until_drained(self._lifecycle.live_models, deadline_s)
        if is_drained:
            log.info("All models are stopped, unloading models")
        else:
            log.error("Exit timeout expired. Exiting immediately.")
            cut(self._lifecycle.live_models())
        is_unloaded = self._lifecycle.close(max(deadline_s - time.monotonic(), UNLOAD_GRACE_S))
        self._repository.close()
        self._shared_memory.close()
        self.tracing.close()
        if not is_unloaded:
            left = {what: count for what, count in self._lifecycle.left_behind().items() if count}
            log.error("Unloading did not end: %s", ", ".join(f"{count} {what}" for what, count in left.items()))
            return False
        self._poller.join()
        self._backends.close()
        self._services.stop()
        return is_drained

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
            versions = self._versions(name)
            if not versions:
                return False
            for state, reason in versions.values():
                if state is not ModelState.READY and (state, reason) != (ModelState.UNAVAILABLE, UNLOADED):
                    return False
        return True

    def model_is_ready(self, name: str, version: int = -1) -> bool:
        """False also for a model that is unknown or not loaded. Answered within a second, as `is_ready` is."""
        try:
            return not self._lifecycle.get(self._key(name), version).not_ready_reason()
        except TritonError:
            return False

    # --- what is served ---------------------------------------------------------------------------------------------

    def server_metadata(self) -> ServerMetadata:
        return ServerMetadata(self._options.server_id, __version__, EXTENSIONS)

    def model_metadata(self, name: str, version: int = -1) -> ModelMetadata:
        key = self._key(name)
        model = self._lifecycle.get(key, version)
        return describe(model, [model] if version >= 0 else self._lifecycle.ready_models(key))

    def model_config(self, name: str, version: int = -1) -> ModelConfig:
        return self._lifecycle.get(self._key(name), version).config

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        """As `model_config` says, without a copy of it: asked with every request."""
        return self._lifecycle.get(name, version).answers_decoupled

    def model_statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        """Of READY versions. Raises TritonError INVALID_ARG for a named model or version that is not READY."""
        keys = self._loader.names.keys(name) if name else [""]
        models = self._lifecycle.ready_models(keys[0]) if len(keys) == 1 else []
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
        for key, sources in self._repository.listing().items():
            name, versions = sources[0].name, self._versions(key)
            if len(sources) > 1:
                rows.append(ModelIndex(name, "", ModelState.UNAVAILABLE.value, DUPLICATE))
                continue
            if not versions:
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
        self._loader.load(name, parameters)

    def start_load(self, name: str, parameters: LoadParameters | None = None) -> Future[None]:
        """`load_model` on a thread for loads: however long it takes, it takes no thread that other calls wait for."""
        self._check_explicit()
        try:
            return self._control.submit(self.load_model, name, parameters)
        except RuntimeError:  # stopped since
            raise unavailable(STOPPING) from None

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload, with the ensembles that are made of it; requests in flight run to their end. With
        `unload_dependents` also what an ensemble is made of, as far as nobody else needs it."""
        self._check_explicit()
        self._loader.unload(name, unload_dependents)

    # --- inference --------------------------------------------------------------------------------------------------

    def infer_async(self, request: InferenceRequest) -> InferenceHandle:
        """Validates and enqueues. Raises TritonError when refused synchronously (then the callback is never called).
        While the server exits, sequences that run may go on."""
        if not (self.is_exiting and self._continues_sequence(request)):
            self._check_serving()
        if request.shared_inputs:
            request = self._shared_memory.with_inputs(request)
        if request.output_places:
            return self._shared_memory.lend(request, self._infer)
        return self._infer(request)

    def acquire_model(self, name: str, version: int = -1) -> LoadedModel:
        """A READY model for one inner request, also while the server stops (see ModelHost)."""
        return self._lifecycle.acquire(self._key(name), version)

    def cancel_requests(self, model_name: str, version: int = -1, request_id: str = "") -> int:
        """Asks every live request of the model with that client id to stop; how many there were. Version -1 = every
        version, also those that only finish what they have. The empty id matches nothing.

        Raises TritonError as `infer_async` does for a model or version that is unknown and has no request left.
        """
        models = [
            model
            for model in self._lifecycle.live_models()
            if model.name == model_name and version in (-1, model.version)
        ]
        if not models:
            self._lifecycle.get(self._key(model_name), version)
        channels = [channel for model in models for channel in model.live.with_id(request_id) if not channel.is_final]
        for channel in channels:
            channel.cancel()
        return len(channels)

    def check(self) -> list[str]:
        """What is left behind, in words, on a server where no request runs and nothing is loaded or unloaded; empty
        when all is well. Each model version checks itself, too, whenever it becomes idle."""
        found = []
        models = self._lifecycle.live_models()
        for model in models:
            left = {"in-flight inferences": model.in_flight.count, **model.left_behind()}
            found += breaches_of(f"model '{model.name}' version {model.version}", left)
        timers = max(len(self._services.timer) - len(models), 0)  # a queue may keep one
        left = {
            **self._loader.left_behind(),
            **self._shared_memory.left_behind(),
            **self._services.rate_limiter.left_behind(),
            "actions for its reaper": self._services.reaper.backlog,
            "traces that are not complete": self.tracing.open_count,
        }
        return found + breaches_of("the server", {**left, "timers without a model": timers})

    # --- inside -----------------------------------------------------------------------------------------------------

    def _infer(self, request: InferenceRequest) -> InferenceHandle:
        return self.acquire_model(request.model_name, request.model_version).infer(request)

    def _continues_sequence(self, request: InferenceRequest) -> bool:
        try:
            sequences = self._lifecycle.get(request.model_name, request.model_version).sequences
        except TritonError:
            return False
        return sequences is not None and sequences.continues(request.correlation_id, request.flags)

    def _fail_to_start(self, timeout_s: float) -> None:
        self.stop(timeout_s)
        self._state = ServerState.FAILED_TO_INITIALIZE

    def _key(self, name: str) -> str:
        """The model that clients mean by `name`. Raises TritonError INVALID_ARG when namespacing leaves that open."""
        return self._loader.names.key(name)

    def _log_tables(self) -> None:
        """What was loaded, as Triton shows it at the end of its start."""
        states = {key: self._lifecycle.versions(key) for key in self._lifecycle.names()}
        log_tables(self._loader.agents.table(), self._backends.table(), states)

    def _versions(self, name: str) -> dict[int, tuple[ModelState, str]]:
        """State and reason of each known version; one whose backend says that it is not ready is UNAVAILABLE."""
        versions = self._lifecycle.versions(name)
        for number, (state, _) in versions.items():
            if state is ModelState.READY and (reason := self._not_ready_reason(name, number)):
                versions[number] = (ModelState.UNAVAILABLE, reason)
        return versions

    def _not_ready_reason(self, name: str, version: int) -> str:
        try:
            return self._lifecycle.get(name, version).not_ready_reason()
        except TritonError as error:
            return error.message  # unloaded since

    def _check_serving(self) -> None:
        if self._state is not ServerState.READY:
            raise unavailable(STOPPING if self.is_exiting else "Server is not ready")

    def _check_explicit(self) -> None:
        if self._options.model_control_mode != "explicit":
            raise unavailable(EXPLICIT_ONLY)
        self._check_serving()
