"""From models' names to serving versions: poll the repository, find the backends, load in order, swap in.

For: the server (startup, load and unload requests). Does not know: server states, protocols. Owner of the repository,
of the dependencies between models, and of one lock per model whose load is under way. Invariants: a model is loaded
after the models that it is made of, and again when one of them has changed; loads that share a model run one after the
other, others do not wait for each other here (a load takes its locks in order of name, so that none waits for ever);
names that clients invent leave nothing behind.
Source: LoadUnloadModels and LoadModelByDependency in Triton's model_repository_manager.cc.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from .backend_manager import BackendManager
from .ensemble_rules import composing_models
from .errors import TritonError, invalid_argument
from .host_services import HostServices
from .load_operation import LoadOperation
from .messages import LoadParameters, ServerOptions
from .model import LoadedModel
from .model_dependencies import ModelDependencies
from .model_lifecycle import ModelLifecycle
from .model_repository import ModelRepository, ModelSpec

log = logging.getLogger(__name__)

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
        self._dependencies = ModelDependencies()
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
        """Loads or reloads a model and what it is made of; blocks until done. Loaded models whose files did not change
        are left alone.

        Raises TritonError: INTERNAL when it can not be polled, INVALID_ARG for a bad name or path and when it fails.
        """
        error = self.load_together({name: parameters}).get(name)
        if error is not None:
            raise error

    def load_together(self, wanted: Mapping[str, LoadParameters | None]) -> dict[str, TritonError]:
        """As `load` for several models, side by side where none is made of another. The errors of those that failed."""
        with self._hold_and_poll(wanted) as polled:
            specs = {name: spec for name, spec in polled.items() if isinstance(spec, ModelSpec)}
            errors = {name: error for name, error in polled.items() if isinstance(error, TritonError)}
            self._dependencies.remember(specs.values(), explicit=wanted.keys())
            operation = LoadOperation(self.lifecycle, specs, missing=errors)
            operation.run()
        self._follow(operation.changed, done=specs.keys())
        errors |= operation.errors
        return {name: error for name, error in errors.items() if name in wanted}

    def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload a model, and every ensemble that is made of it; unknown models are fine. With
        `unload_dependents` also the parts of an ensemble that were loaded for its sake alone."""
        removed = self._dependencies.forget(name, with_parts=unload_dependents)
        for model in removed:
            self.lifecycle.unload(model)
        for ensemble in self._dependencies.affected_by(removed):
            if self.lifecycle.loaded_spec(ensemble) is not None:
                log.error("ensemble %s contains models that are not available or ambiguous: %s", ensemble, name)
            self.lifecycle.unload(ensemble)

    def left_behind(self) -> dict[str, int]:
        """Counts that are 0 while nothing is loaded or unloaded."""
        return {"loads waiting for each other": len(self._locks), **self.lifecycle.left_behind()}

    @contextmanager
    def _hold_and_poll(
        self, wanted: Mapping[str, LoadParameters | None]
    ) -> Iterator[dict[str, ModelSpec | TritonError]]:
        """The wanted models and all that they are made of as the repository has them, with the locks of all of them
        held; or why one can not be polled."""
        names = set(wanted)
        while True:
            with ExitStack() as locks:
                for name in sorted(names):
                    locks.enter_context(self._locks.hold(name))
                polled = self._poll(wanted)
                if names.issuperset(polled):
                    yield polled
                    return
            names.update(polled)

    def _poll(self, wanted: Mapping[str, LoadParameters | None]) -> dict[str, ModelSpec | TritonError]:
        polled: dict[str, ModelSpec | TritonError] = {}
        pending = dict(wanted)
        while pending:
            name, parameters = pending.popitem()
            try:
                spec = polled[name] = self.repository.poll(name, parameters)
            except TritonError as error:
                polled[name] = error
            else:
                for part in composing_models(spec.config):
                    if part not in polled:
                        pending.setdefault(part, None)
        return polled

    def _follow(self, changed: set[str], done: Collection[str]) -> None:
        """Loads again, or unloads, the ensembles that are made of changed models."""
        for name in self._dependencies.affected_by(changed):
            if name in done:
                continue
            with self._locks.hold(name):
                spec = self._dependencies.spec(name)
                if spec is not None:
                    operation = LoadOperation(self.lifecycle, {name: spec}, changed=changed)
                    operation.run()
                    changed = operation.changed

    def _make_model(self, spec: ModelSpec, version: int) -> LoadedModel:
        version_directory = spec.directory / str(version)
        backend = self._backends.get(spec.config.backend, spec.name, version_directory, spec.config.runtime)
        model = LoadedModel(spec, version, backend, self._services, self._options.auto_complete_config)
        model.load()
        return model
