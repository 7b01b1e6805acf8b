"""The state of every version of every model: a table changed by the life cycle and read by everything else.

Invariants: one lock guards the table; a version that is READY or UNLOADING has a model; a model that may have requests
is either serving or draining; a load changes all of its versions or none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from ..errors import TritonError, not_found, shown_name, unavailable
from ..models.model import LoadedModel
from ..models.model_instance import InFlight
from ..repository.model_files import ModelIdentifier
from ..repository.model_repository import ModelSpec

STOPPING = "Server is stopping"
UNLOADED = "unloaded"


class ModelReadyState(Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


StateListener = Callable[[str, int, ModelReadyState, str], None]
"""Called with model, version, state and reason after each change, under the lock of the table: it must only enqueue."""


@dataclass
class VersionEntry:
    """`model` serves while the version is READY and drains while it is UNLOADING."""

    state: ModelReadyState = ModelReadyState.LOADING
    reason: str = ""
    model: LoadedModel | None = None

    def stop_serving(self) -> LoadedModel | None:
        """Takes the version out of service. Returns the model to retire, if one was serving."""
        if self.state is ModelReadyState.READY:
            self.state = ModelReadyState.UNLOADING
            return self.model
        if self.state is ModelReadyState.LOADING:
            self.state, self.reason = ModelReadyState.UNAVAILABLE, UNLOADED
        return None


@dataclass
class ModelEntry:
    """All versions of one model.

    spec: what the serving versions were loaded from; None when nothing serves
    reported: state and reason of each version as the listener knows them
    operation: number of loads and unloads so far; a load that finds a higher number than its own was overtaken
    """

    versions: dict[int, VersionEntry]
    spec: ModelSpec | None = None
    reported: dict[int, tuple[ModelReadyState, str]] = field(default_factory=dict)
    operation: int = 0

    def fail_load(self, wanted: Collection[int], errors: Mapping[int, TritonError]) -> None:
        """Marks the wanted versions that do not serve UNAVAILABLE. errors: by version."""
        for number in wanted:
            version = self.versions[number]
            if version.model is None:
                version.state = ModelReadyState.UNAVAILABLE
                version.reason = errors[number].status if number in errors else UNLOADED

    def swap_in(self, spec: ModelSpec, models: Mapping[int, LoadedModel]) -> list[LoadedModel]:
        """Serves only `models`. Returns the models to retire."""
        retired: list[LoadedModel] = []
        for number, version in self.versions.items():
            if number in models:
                if version.model is not None and version.model is not models[number]:
                    retired.append(version.model)
                self.versions[number] = VersionEntry(ModelReadyState.READY, model=models[number])
            elif (model := version.stop_serving()) is not None:
                retired.append(model)
        self.spec = spec
        return retired


@dataclass(frozen=True)
class Load:
    """A load in progress. updated: serving versions that are updated in place; their `in_flight` stays entered."""

    spec: ModelSpec
    operation: int
    updated: Mapping[int, LoadedModel]


class ModelVersions:
    """Models are identified by ModelIdentifier. Thread-safe."""

    def __init__(self, on_change: StateListener) -> None:
        self.operations = InFlight()  # loads and retirements
        self._on_change = on_change
        self._lock = threading.Lock()
        self._models: dict[str, ModelEntry] = {}
        self._draining: set[LoadedModel] = set()
        self.is_closing = False

    # --- look-up ----------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._models)

    def states(self, name: str) -> dict[int, tuple[ModelReadyState, str]]:
        """State and reason of each known version, ascending; {} for a model that was never loaded."""
        with self._lock:
            entry = self._models.get(name)
            versions = entry.versions if entry is not None else {}
            return {number: (version.state, version.reason) for number, version in sorted(versions.items())}

    def ready_versions(self, name: str) -> list[int]:
        return [number for number, (state, _) in self.states(name).items() if state is ModelReadyState.READY]

    def loaded_spec(self, name: str) -> ModelSpec | None:
        with self._lock:
            entry = self._models.get(name)
            return entry.spec if entry is not None else None

    def acquire(self, name: ModelIdentifier, version: int = -1) -> LoadedModel:
        """A READY model with its `in_flight` entered; -1 = the highest READY version. Raises TritonError NOT_FOUND or
        UNAVAILABLE with Triton's texts."""
        with self._lock:
            model = self._ready_model(name, version)
            model.in_flight.enter()
            return model

    def get(self, name: ModelIdentifier, version: int = -1) -> LoadedModel:
        """Like `acquire` without entering `in_flight`: for uses that remain valid after an unload."""
        with self._lock:
            return self._ready_model(name, version)

    def ready_models(self, name: ModelIdentifier | None = None) -> list[LoadedModel]:
        """The serving versions of one model, or of all, sorted by name and version."""
        with self._lock:
            entries = self._models.values() if name is None else filter(None, [self._models.get(name)])
            found = [
                version.model
                for entry in entries
                for version in entry.versions.values()
                if version.model is not None and version.state is ModelReadyState.READY
            ]
        return sorted(found, key=lambda model: (model.name, model.version))

    def live_models(self) -> list[LoadedModel]:
        """All models that may have requests: serving and draining ones."""
        ready = self.ready_models()
        with self._lock:
            return ready + [model for model in self._draining if model not in ready]

    def leaked_resources(self) -> dict[str, int]:
        """Counts that are 0 while nothing is loaded or unloaded."""
        with self._lock:
            versions = [version for entry in self._models.values() for version in entry.versions.values()]
            states = [version.state for version in versions]
            models = [version.model for version in versions if version.model is not None]
            return {
                "loads and unloads under way": self.operations.count,
                "model versions that drain": len(self._draining),
                "model versions in state LOADING": states.count(ModelReadyState.LOADING),
                "model versions in state UNLOADING": states.count(ModelReadyState.UNLOADING),
                "removed instances that still run": sum(model.instance_set.removal_count for model in models),
            }

    # --- changes, for ModelLifecycle --------------------------------------------------------------------------------

    def refuse_loads(self) -> None:
        with self._lock:
            self.is_closing = True

    def record_without_versions(self, name: str) -> None:
        """Records a model without a version to load, until it is unloaded. A serving model keeps serving."""
        with self._lock:
            self._models.setdefault(name, ModelEntry({}))

    def begin_load(self, spec: ModelSpec, can_update: Callable[[LoadedModel], bool]) -> Load:
        """Versions that do not serve become LOADING; the others keep serving. can_update: which of the latter are
        updated in place. `end_load` must follow. Raises TritonError UNAVAILABLE after `refuse_loads`."""
        with self._lock:
            if self.is_closing:
                raise unavailable(STOPPING)
            self.operations.enter()
            entry = self._models.setdefault(spec.key, ModelEntry({}))
            entry.operation += 1
            updated = {}
            for number in spec.versions:
                version = entry.versions.get(number)
                if version is None or version.state is not ModelReadyState.READY:
                    entry.versions[number] = VersionEntry(ModelReadyState.LOADING)
                elif version.model is not None and can_update(version.model):
                    version.model.in_flight.enter()
                    updated[number] = version.model
            self._notify_listener(spec.key, entry)
            return Load(spec, entry.operation, updated)

    def swap(
        self, load: Load, models: Mapping[int, LoadedModel], errors: Mapping[int, TritonError]
    ) -> tuple[bool, list[LoadedModel]]:
        """Puts all new models into service, or none if there were errors or a newer operation has overtaken the load.
        Returns whether it was overtaken, and the models to retire, which are draining from now on."""
        with self._lock:
            entry = self._models[load.spec.key]
            is_outdated = entry.operation != load.operation
            if is_outdated or errors:
                retired = [model for version, model in models.items() if version not in load.updated]
                if not is_outdated:
                    entry.fail_load(load.spec.versions, errors)
            else:
                retired = entry.swap_in(load.spec, models)
            self._begin_draining(retired)
            self._notify_listener(load.spec.key, entry)
            return is_outdated, retired

    def end_load(self, load: Load) -> None:
        for model in load.updated.values():
            model.in_flight.leave()
        self.operations.leave()

    def stop_serving(self, name: str) -> list[LoadedModel]:
        """Takes all versions of a model out of service and overtakes running loads. Returns the models to retire, which
        are draining from now on."""
        with self._lock:
            entry = self._models.get(name)
            if entry is None:
                return []
            if not entry.versions:
                del self._models[name]
                return []
            entry.operation += 1
            entry.spec = None
            retired = [model for version in entry.versions.values() if (model := version.stop_serving()) is not None]
            self._begin_draining(retired)
            self._notify_listener(name, entry)
            return retired

    def end_draining(self, model: LoadedModel) -> None:
        """Called when the model has been finalised. Its retirement counts as an operation until `operations.leave`."""
        with self._lock:
            self._draining.discard(model)
            for version in self._models[model.key].versions.values():
                if version.model is model:
                    version.model = None
                    version.state, version.reason = ModelReadyState.UNAVAILABLE, UNLOADED
            self._notify_listener(model.key, self._models[model.key])

    def _notify_listener(self, name: str, entry: ModelEntry) -> None:
        """Notifies the listener of versions whose state or reason has changed since the last call."""
        now = {number: (version.state, version.reason) for number, version in entry.versions.items()}
        changed = [number for number in now if now[number] != entry.reported.get(number)]
        entry.reported = now
        for number in changed:
            self._on_change(name, number, *now[number])

    def _begin_draining(self, models: Collection[LoadedModel]) -> None:
        for model in models:
            self.operations.enter()
            self._draining.add(model)

    def _ready_model(self, name: ModelIdentifier, version: int) -> LoadedModel:
        entry = self._models.get(name)
        versions = {} if entry is None else entry.versions
        states = {number: one.state for number, one in versions.items()}
        model = versions[ready_version(name, version, None if entry is None else states)].model
        assert model is not None, "a READY version has a model"
        return model


def ready_version(name: str, version: int, states: Mapping[int, ModelReadyState] | None) -> int:
    """The READY version for a request. version: -1 = the highest. states: each version's state; None for an unknown
    model. Raises TritonError NOT_FOUND or UNAVAILABLE with Triton's texts."""
    if states is None:
        raise not_found(f"{_unknown(name)} is not found")
    if version >= 0:
        if version not in states:
            raise not_found(f"{_unknown(name)} version {version} is not found")
        if states[version] is not ModelReadyState.READY:
            raise unavailable(f"{_unknown(name)} version {version} is not at ready state")
        return version
    ready = [number for number, state in states.items() if state is ModelReadyState.READY]
    if not ready:
        raise not_found(f"{_unknown(name)} has no available versions")
    return max(ready)


def _unknown(name: str) -> str:
    return f"Request for unknown model: '{shown_name(name)}'"
