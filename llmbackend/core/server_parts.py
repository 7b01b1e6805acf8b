"""Every part of the host, and the state of the server that they make up.

For: the doors (inference_door.py, control_door.py, served_models.py) and the server, which are made of it. Does not
know: what is asked of the parts. Invariant: one owner; nothing runs before `InferenceServer.start`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto

from prometheus_client import CollectorRegistry

from llmbackend.waiting.timer import Timer

from .backend_manager import BackendManager
from .caching.cache_slot import CacheSlot
from .conservation import BreachLog
from .errors import unavailable
from .host_services import HostGpus, HostServices
from .inner_door import ModelHost
from .lifecycle.model_lifecycle import STOPPING
from .lifecycle.model_loading import ModelLoader
from .lifecycle.repository_polling import RepositoryPoller
from .memory.shared_memory import SharedMemory
from .messages import ServerOptions
from .metrics.metric_family import MetricFamilies
from .metrics.metrics import register_metrics
from .models.model import LoadedModel
from .requests.reaper import Reaper
from .scheduling.rate_limiter import RateLimiter
from .tracing.manager import TraceManager

CONTROL_THREADS = 8
"""Load requests that run or wait for another load of their model; more than these wait."""


class ServerState(Enum):
    INVALID = auto()
    INITIALIZING = auto()
    READY = auto()
    EXITING = auto()
    FAILED_TO_INITIALIZE = auto()


class ServerParts:
    """`host`: what the models may ask of the server, which is the server itself."""

    def __init__(self, options: ServerOptions, host: ModelHost) -> None:
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
            host,
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
    def is_exiting(self) -> bool:
        return self._state is ServerState.EXITING

    def _check_serving(self) -> None:
        if self._state is not ServerState.READY:
            raise unavailable(STOPPING if self.is_exiting else "Server is not ready")

    def _model(self, name: str, version: int = -1) -> LoadedModel:
        """The READY model that clients mean by `name`, for those who only read what stays valid after an unload.
        -1 = the highest READY version.

        Raises TritonError NOT_FOUND or UNAVAILABLE with Triton's texts, INVALID_ARG when namespacing leaves it open.
        """
        return self._lifecycle.get(self._loader.names.key(name), version)
