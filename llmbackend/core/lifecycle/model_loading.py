"""From models' names to serving versions: poll the repository, find the backends, load in order, swap in.

For: the server (startup, load and unload requests) and poll mode. Does not know: server states, protocols. Owner of the
repository, of the dependencies between models, and of one lock per model whose load is under way. Invariants: a model
is loaded after the models that it is made of, and again when one of them has changed; loads that share a model run one
after the other, others do not wait for each other here (a load takes its locks in order of name, so that none waits for
ever); names that clients invent leave nothing behind.
Source: LoadUnloadModels and LoadModelByDependency in Triton's model_repository_manager.cc.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from llmbackend.core.backend_manager import BackendManager
from llmbackend.core.config.ensemble_rules import composing_models
from llmbackend.core.errors import ErrorCode, TritonError, internal, invalid_argument
from llmbackend.core.host_services import HostServices
from llmbackend.core.messages import LoadParameters, ServerOptions
from llmbackend.core.models.model import LoadedModel
from llmbackend.core.repository.load_parameters import check_model_name
from llmbackend.core.repository.model_dependencies import ModelDependencies
from llmbackend.core.repository.model_files import ModelSource
from llmbackend.core.repository.model_names import ModelNames
from llmbackend.core.repository.model_repository import ModelRepository, ModelSpec
from llmbackend.core.repository.repository_agents import AgentManager

from .load_operation import LoadOperation
from .model_lifecycle import ModelLifecycle
from .model_versions import ModelState

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
        self.names = ModelNames(options.model_namespacing)
        self.agents = AgentManager(options.repoagent_directory)
        self.repository = ModelRepository(
            options.model_repositories,
            options.auto_complete_config,
            self.agents,
            options.model_config_name,
            options.model_namespacing,
        )
        self.lifecycle = ModelLifecycle(
            self._make_model, options.model_load_thread_count, options.model_load_retry_count
        )

    def startup_models(self) -> list[str]:
        """Names of the models to load at start. Raises TritonError INVALID_ARG for '*' next to other names."""
        names = list(dict.fromkeys(self._options.startup_models))
        if self._options.model_control_mode == "explicit":
            if ALL_MODELS not in names:
                return names
            if len(names) > 1:
                raise invalid_argument("Wildcard model name '*' must be the ONLY startup model if specified at all.")
        return list(dict.fromkeys(sources[0].name for sources in self.repository.listing().values()))

    def load(self, name: str, parameters: LoadParameters | None = None) -> None:
        """Loads or reloads every model of that name, and what it is made of; blocks until done. Loaded models whose
        files did not change are left alone.

        Raises TritonError: INTERNAL when it can not be polled, INVALID_ARG for a bad name or path and when it fails.
        """
        errors = self.load_together({name: parameters})
        if errors:
            raise joined(list(errors.values()))

    def load_together(self, wanted: Mapping[str, LoadParameters | None]) -> dict[str, TritonError]:
        """As `load` for several models, side by side where none is made of another. The errors of those that failed, by
        key."""
        with self._hold_and_poll(wanted) as polled:
            specs = {key: spec for key, spec in polled.items() if isinstance(spec, ModelSpec)}
            errors = {key: error for key, error in polled.items() if isinstance(error, TritonError)}
            asked = {key for key in polled if self.names.plain(key) in wanted}
            self._dependencies.remember(specs.values(), explicit=asked)
            operation = LoadOperation(self.lifecycle, self._load_spec, specs, missing=errors)
            operation.run()
        self._follow(operation.changed, done=specs.keys())
        errors |= operation.errors
        return {key: error for key, error in errors.items() if key in asked}

    def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload every model of that name, and every ensemble that is made of it; unknown models are fine.
        With `unload_dependents` also the parts of an ensemble that were loaded for its sake alone.

        Raises TritonError INVALID_ARG for a bad name, INTERNAL when a load came between and versions serve on.
        """
        check_model_name(name)
        for key in self.names.keys(name):
            self.unload_key(key, unload_dependents)
            states = self.lifecycle.versions(key).items()
            available = [version for version, (state, _) in states if state is ModelState.READY]
            if available:
                raise internal(
                    f"failed to unload '{name}', versions that are still available: {','.join(map(str, available))}"
                )

    def unload_key(self, key: str, unload_dependents: bool = False) -> None:
        """As `unload`, of one model."""
        removed = self._dependencies.forget(key, with_parts=unload_dependents)
        for model in removed:
            self.names.discard(model)
            self.lifecycle.unload(model)
        for ensemble in self._dependencies.affected_by(removed):
            if self.lifecycle.loaded_spec(ensemble) is not None:
                log.error("ensemble %s contains models that are not available or ambiguous: %s", ensemble, key)
            self.lifecycle.unload(ensemble)

    def is_current(self, source: ModelSource) -> bool:
        """Whether what serves was loaded from these very files."""
        loaded = self.lifecycle.loaded_spec(source.key)
        return loaded is not None and loaded.signature == self.repository.signature(source)

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
            found = self.repository.poll(name, parameters)
            polled.update(found)
            for spec in found.values():
                parts = composing_models(spec.config) if isinstance(spec, ModelSpec) else ()
                pending.update({part: None for part in parts if part not in polled and part not in pending})
        return polled

    def _follow(self, changed: set[str], done: Collection[str]) -> None:
        """Loads again, or unloads, the ensembles that are made of changed models."""
        for name in self._dependencies.affected_by(changed):
            if name in done:
                continue
            with self._locks.hold(name):
                spec = self._dependencies.spec(name)
                if spec is not None:
                    operation = LoadOperation(self.lifecycle, self._load_spec, {name: spec}, changed=changed)
                    operation.run()
                    changed = operation.changed

    def _load_spec(self, spec: ModelSpec) -> None:
        self.repository.ask_agents(spec)
        self.names.add(spec.name, spec.key)
        try:
            self.lifecycle.load(spec)
        finally:
            if spec.agents is not None:
                spec.agents.abandon()

    def _make_model(self, spec: ModelSpec, version: int) -> LoadedModel:
        version_directory = spec.directory / str(version)
        backend = self._backends.get(spec.config.backend, spec.name, version_directory, spec.config.runtime)
        model = LoadedModel(spec, version, backend, self._services, self._options.auto_complete_config)
        model.load()
        return model


def joined(errors: Sequence[TritonError]) -> TritonError:
    """One error for all models of a name; that of a failed load tells more than that of a failed poll."""
    first = sorted(errors, key=lambda error: error.code is not ErrorCode.INVALID_ARG)[0]
    same = dict.fromkeys(error.message for error in errors if error.code is first.code)
    return first if len(same) == 1 else TritonError("".join(same), first.code)
