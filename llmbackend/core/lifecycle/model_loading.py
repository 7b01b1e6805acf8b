"""From model names to serving versions: polls the repository, finds the backend, loads in dependency order.

Invariants: an ensemble is loaded after its composing models, and again when one of them changes; loads that share a
model are serialised, others run in parallel; names of nonexistent models leave no state behind. Source:
LoadUnloadModels and LoadModelByDependency in Triton's model_repository_manager.cc.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from ..activity.hub import Source
from ..activity.messages import ModelActivity
from ..backend_api import served_names
from ..backend_manager import BackendManager
from ..config.model_config_rules import composing_models
from ..errors import ErrorCode, LoadError, TritonError, internal, invalid_argument
from ..host_services import HostServices
from ..messages import LoadParameters
from ..models.model import LoadedModel
from ..repository.model_files import ModelNames, ModelSource
from ..repository.model_repository import ModelRepository, ModelSpec, check_model_name
from ..repository.repository_agents import AgentManager
from ..server_options import ServerOptions
from .ensembles import Faults, ModelDependencies, dependency_cycles, dependency_levels, parts_of, validate_ensemble
from .model_lifecycle import ModelLifecycle
from .model_versions import ModelReadyState

log = logging.getLogger(__name__)

ALL_MODELS = "*"


class NamedLocks:
    """One lock per name; it exists only while it is held or awaited."""

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
            self._make_model, options.model_load_thread_count, options.model_load_retry_count, self._state_changed
        )

    def startup_models(self) -> list[str]:
        """Names of the models to load at start. Raises TritonError INVALID_ARG if '*' is combined with other names."""
        names = list(dict.fromkeys(self._options.startup_models))
        if self._options.model_control_mode == "explicit":
            if ALL_MODELS not in names:
                return names
            if len(names) > 1:
                raise invalid_argument("Wildcard model name '*' must be the ONLY startup model if specified at all.")
        return list(dict.fromkeys(sources[0].name for sources in self.repository.listing().values()))

    def load(self, name: str, parameters: LoadParameters | None = None) -> None:
        """Loads or reloads every model of that name with its composing models; blocks until done. Loaded models whose
        files have not changed are left alone. Raises TritonError: INTERNAL if a model cannot be polled, INVALID_ARG for
        an invalid name or path and if the load fails."""
        errors = self.load_together({name: parameters})
        if errors:
            raise _joined(list(errors.values()))

    def load_together(self, wanted: Mapping[str, LoadParameters | None]) -> dict[str, TritonError]:
        """Like `load`, for several models, in parallel where possible. Returns the errors by key."""
        with self._hold_and_poll(wanted) as polled:
            specs = {key: spec for key, spec in polled.items() if isinstance(spec, ModelSpec)}
            errors = {key: error for key, error in polled.items() if isinstance(error, TritonError)}
            asked = {key for key in polled if key in wanted or self.names.plain(key) in wanted}
            self._dependencies.remember(specs.values(), explicit=asked)
            operation = LoadOperation(self.lifecycle, self._load_spec, specs, missing=errors)
            operation.run()
        self._update_ensembles(operation.changed, done=specs.keys())
        errors |= operation.errors
        return {key: error for key, error in errors.items() if key in asked}

    def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Begins to unload every model of that name, and every ensemble that contains it. Ignores unknown models.

        unload_dependents: also unload composing models that were loaded only for an ensemble that is unloaded

        Raises TritonError INVALID_ARG for an invalid name, INTERNAL if versions still serve because of a concurrent
        load.
        """
        check_model_name(name)
        for key in self.names.keys(name):
            self.unload_key(key, unload_dependents)
            available = self.lifecycle.versions.ready_versions(key)
            if available:
                raise internal(
                    f"failed to unload '{name}', versions that are still available: {','.join(map(str, available))}"
                )

    def unload_key(self, key: str, unload_dependents: bool = False) -> None:
        """Like `unload`, for one model by its key."""
        removed = self._dependencies.forget(key, with_parts=unload_dependents)
        for model in removed:
            self.names.discard(model)
            self.lifecycle.unload(model)
        for ensemble in self._dependencies.affected_by(removed):
            if self.lifecycle.versions.loaded_spec(ensemble) is not None:
                log.error("ensemble %s contains models that are not available or ambiguous: %s", ensemble, key)
            self.lifecycle.unload(ensemble)

    def is_current(self, source: ModelSource) -> bool:
        """Whether the serving versions were loaded from the current files."""
        loaded = self.lifecycle.versions.loaded_spec(source.key)
        return loaded is not None and loaded.signature == self.repository.signature(source)

    def is_linked(self, key: str) -> bool:
        """False for a loaded ensemble whose steps now refer to models in other namespaces."""
        loaded = self.lifecycle.versions.loaded_spec(key)
        return loaded is None or self.repository.is_linked(loaded)

    def leaked_resources(self) -> dict[str, int]:
        """Counts that are 0 while nothing is loaded or unloaded."""
        return {"loads waiting for each other": len(self._locks), **self.lifecycle.versions.leaked_resources()}

    @contextmanager
    def _hold_and_poll(
        self, wanted: Mapping[str, LoadParameters | None]
    ) -> Iterator[dict[str, ModelSpec | TritonError]]:
        """Holds the locks of the wanted models and their composing models. Yields, by key, each specification or the
        reason why the model cannot be polled."""
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

    def _update_ensembles(self, changed: set[str], done: Collection[str]) -> None:
        """Reloads or unloads the ensembles that contain changed models."""
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
        is_reload = self.lifecycle.versions.loaded_spec(spec.key) is not None
        if not is_reload:  # so that clients are told that the model is not ready yet, by any of its names
            self.names.serve_as(spec.key, served_names(spec.config))
        try:
            self.lifecycle.load(spec)
            is_serving = self.lifecycle.versions.loaded_spec(spec.key) is spec
            # An unload that came before the load but after the names were added has discarded them. Until a reload
            # ends, and after a failure, the old version serves under its own names.
            if is_serving and (self.names.add(spec.name, spec.key) or is_reload):
                self.names.serve_as(spec.key, served_names(spec.config))
            if is_serving and self.lifecycle.versions.loaded_spec(spec.key) is not spec:
                self.names.discard(spec.key)  # an unload has come meanwhile
        finally:
            if spec.agents is not None:
                spec.agents.close_unless_loaded()

    def _state_changed(self, model: str, version: int, state: ModelReadyState, reason: str) -> None:
        activity = ModelActivity(time=time.time(), state=state.value, reason=reason)
        self._services.activity.report(Source(model, str(version)), activity)

    def _make_model(self, spec: ModelSpec, version: int) -> LoadedModel:
        version_directory = spec.directory / str(version)
        backend = self._backends.get(spec.config.backend, spec.name, version_directory, spec.config.runtime)
        model = LoadedModel(
            spec,
            version,
            backend,
            self._services,
            self._options.auto_complete_config,
            self._options.starts_instances,
        )
        model.load()
        return model


def _joined(errors: Sequence[TritonError]) -> TritonError:
    """Combines the errors of all models of a name: errors of failed loads first, then those of failed polls."""
    first = sorted(errors, key=lambda error: error.code is not ErrorCode.INVALID_ARG)[0]
    same = dict.fromkeys(error.message for error in errors if error.code is first.code)
    return first if len(same) == 1 else TritonError("".join(same), first.code)


class LoadOperation:
    """Loads some models level by level: ensembles after their composing models, the models of a level in parallel. A
    loaded model that did not change is left alone unless a composing model changed. An ensemble that cannot serve is
    unloaded. The caller holds the locks of these models."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        load: Callable[[ModelSpec], None],
        specs: Mapping[str, ModelSpec],
        missing: Collection[str] = (),
        changed: Collection[str] = (),
    ) -> None:
        """load: loads one model; the others are models by key, and keys of absent and of already changed ones."""
        self.changed = set(changed)  # keys of models that started or stopped serving, or changed
        self.errors: dict[str, TritonError] = {}  # by key
        self._lifecycle = lifecycle
        self._load_spec = load
        self._specs = specs
        self._parts = parts_of(specs)
        self._cycles = dependency_cycles(self._parts)
        self._faults = Faults(missing)

    def run(self) -> None:
        for level in dependency_levels(self._specs, self._parts):
            if len(level) == 1:
                self._load(level[0])
                continue
            with ThreadPoolExecutor(len(level), thread_name_prefix="load") as pool:
                list(pool.map(self._load, level))

    def _load(self, name: str) -> None:
        spec = self._specs[name]
        reason = self._cycles.get(name) or self._validate_ensemble(spec)
        if not reason and not self._is_current(spec):
            try:
                self._load_spec(spec)
            except TritonError as error:
                self._faults.failed[name] = error.reason if isinstance(error, LoadError) else error.message
                self.errors[name] = error
                return
            self.changed.add(name)
            reason = self._validate_ensemble(spec)  # a composing model may have been unloaded in the meantime
        if reason:
            self._reject(name, reason)

    def _validate_ensemble(self, spec: ModelSpec) -> str:
        return validate_ensemble(spec, self._lifecycle.versions, self._faults) if self._parts[spec.key] else ""

    def _is_current(self, spec: ModelSpec) -> bool:
        loaded = self._lifecycle.versions.loaded_spec(spec.key)
        if loaded is None or spec.has_override or loaded.signature != spec.signature:
            return False
        parts = self._parts[spec.key]
        return parts == list(composing_models(loaded.config)) and self.changed.isdisjoint(parts)

    def _reject(self, name: str, reason: str) -> None:
        log.error("%s", reason)
        if self._lifecycle.versions.loaded_spec(name) is not None:
            self.changed.add(name)
        self._lifecycle.unload(name)
        self._faults.invalid[name] = reason
        self.errors[name] = LoadError(name, f"{reason}\n")


@dataclass(frozen=True, slots=True)
class Changes:
    """Differences between the repositories and the serving models.

    load: names of models that are new or changed
    link: keys of ensembles whose steps now refer to models in other namespaces
    unload: keys of models that have disappeared or are now in several repositories
    """

    load: Sequence[str]
    link: Sequence[str]
    unload: Sequence[str]


def find_changes(loader: ModelLoader) -> Changes:
    """Raises OSError if a repository cannot be read."""
    listing = loader.repository.listing()
    single = {key: sources[0] for key, sources in listing.items() if len(sources) == 1}
    for key, sources in listing.items():
        if len(sources) > 1:
            log.error("failed to poll model '%s': not unique across all model repositories", key)
    gone = [key for key in loader.names.known() if key not in single]
    return Changes(_changed(loader, single), [key for key in single if not loader.is_linked(key)], gone)


def _changed(loader: ModelLoader, sources: Mapping[str, ModelSource]) -> list[str]:
    names: dict[str, None] = {}
    for source in sources.values():
        try:
            if not loader.is_current(source):
                names[source.name] = None
        except TritonError:
            log.debug("model '%s' cannot be read; trying again at the next poll", source.key)
    return list(names)


class RepositoryPoller:
    """Polls repositories on its own thread."""

    def __init__(self, loader: ModelLoader, interval_s: float) -> None:
        self._loader = loader
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        thread = threading.Thread(target=self._run, name="repository-poll", daemon=True)
        thread.start()
        self._thread = thread

    def stop(self) -> None:
        """Starts no further poll; a running poll finishes its loads."""
        self._stopped.set()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> None:
        """Loads and unloads models until those serving match the repositories. Logs errors."""
        try:
            changes = find_changes(self._loader)
        except OSError as error:
            log.error("failed to poll model repository '%s': %s", error.filename, error.strerror)
            return
        # Before the old composing models are unloaded, so that the ensembles serve throughout.
        self._loader.load_together(dict.fromkeys(changes.link))
        for key in changes.unload:
            self._loader.unload_key(key)
        for failure in self._loader.load_together(dict.fromkeys(changes.load)).values():
            if not self._stopped.is_set():
                log.error("%s", failure)

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self.poll()
            except Exception:
                log.exception("polling the model repositories failed")
