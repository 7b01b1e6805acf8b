"""From a model's name to serving versions: poll the repository, find the backend, load, swap in.

For: the server (startup, load requests). Does not know: server states, protocols. Owner of the repository and of one
lock per model whose load is under way. Invariants: two loads of one model run one after the other, loads of different
models do not wait for each other here; names that clients invent leave nothing behind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .backend_manager import BackendManager
from .errors import invalid_argument
from .host_services import HostServices
from .messages import LoadParameters, ServerOptions
from .model import LoadedModel
from .model_lifecycle import ModelLifecycle
from .model_repository import ModelRepository, ModelSpec

ALL_MODELS = "*"


class NamedLocks:
    """One lock per name that somebody holds or waits for, and none for other names."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    def __len__(self) -> int:
        return len(self._locks)

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        with self._guard:
            lock, users = self._locks.get(name, (threading.Lock(), 0))
            self._locks[name] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, users = self._locks.pop(name)
                if users > 1:
                    self._locks[name] = (lock, users - 1)


class ModelLoader:
    def __init__(self, options: ServerOptions, backends: BackendManager, services: HostServices) -> None:
        self._options = options
        self._backends = backends
        self._services = services
        self._locks = NamedLocks()
        self.repository = ModelRepository(options.model_repositories, options.auto_complete_config)
        self.lifecycle = ModelLifecycle(
            self._make_model, options.model_load_thread_count, options.model_load_retry_count
        )

    def startup_models(self) -> list[str]:
        """Names of the models to load at start. Raises TritonError INVALID_ARG for '*' next to other names."""
        if self._options.model_control_mode == "none":
            return list(self.repository.names())
        names = list(dict.fromkeys(self._options.startup_models))
        if ALL_MODELS not in names:
            return names
        if len(names) > 1:
            raise invalid_argument("Wildcard model name '*' must be the ONLY startup model if specified at all.")
        return list(self.repository.names())

    def load(self, name: str, parameters: LoadParameters | None = None) -> None:
        """Loads or reloads; blocks until done. A loaded model whose files did not change is left alone.

        Raises TritonError: INTERNAL when it can not be polled, INVALID_ARG for a bad name or path and when it fails.
        """
        with self._locks.hold(name):
            spec = self.repository.poll(name, parameters)
            loaded = self.lifecycle.loaded_spec(name)
            if loaded is not None and not spec.has_override and loaded.signature == spec.signature:
                return
            self.lifecycle.load(spec)

    def left_behind(self) -> dict[str, int]:
        """Counts that are 0 while nothing is loaded or unloaded."""
        return {"loads waiting for each other": len(self._locks), **self.lifecycle.left_behind()}

    def _make_model(self, spec: ModelSpec, version: int) -> LoadedModel:
        version_directory = spec.directory / str(version)
        backend = self._backends.get(spec.config.backend, spec.name, version_directory, spec.config.runtime)
        model = LoadedModel(spec, version, backend, self._services, self._options.auto_complete_config)
        model.load()
        return model
