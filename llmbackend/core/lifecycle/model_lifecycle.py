"""The state of every version of every model, and the only way from one state to another.

For: the server (load, unload, look-up). Does not know: repositories, protocols. Owner of every LoadedModel.
Invariants: a new version serves before the old one stops (no downtime); a load changes all of its versions or none; a
model is finalised only when its last in-flight handle is gone, on a thread of its own; a load that was overtaken by a
newer operation undoes itself.
Source: Triton's model life cycle (reference §1.6, §2.10); golden transcripts 06, 07, 50, 51.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from llmbackend.core.errors import TritonError, as_triton_error, unavailable
from llmbackend.core.models.in_flight import InFlight
from llmbackend.core.models.instance_update import is_update
from llmbackend.core.models.model import LoadedModel
from llmbackend.core.repository.model_repository import ModelSpec

from .draining import wait_for_last_request, wait_until_unloaded
from .load_errors import LoadError, error_of, what_failed
from .model_lookup import ModelLookup
from .model_versions import UNLOADED, ModelEntry, ModelState, VersionEntry, stop_serving

log = logging.getLogger(__name__)

STOPPING = "Server is stopping"
OUTDATED = "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
ModelFactory = Callable[[ModelSpec, int], LoadedModel]
"""Makes and loads one version; raises TritonError."""


class ModelLifecycle(ModelLookup):
    def __init__(self, make_model: ModelFactory, load_thread_count: int, load_retry_count: int) -> None:
        super().__init__()
        self._make_model = make_model
        self._retries = load_retry_count
        self._pool = ThreadPoolExecutor(max(load_thread_count, 1), thread_name_prefix="model-load")
        self._operations = InFlight()  # loads and retirements under way
        self._is_closing = False

    # --- operations -------------------------------------------------------------------------------------------------

    def load(self, spec: ModelSpec) -> None:
        """Loads the versions of `spec` and swaps them in together; blocks until done. A version that differs by its
        instances alone is changed in place.

        Raises TritonError INVALID_ARG with Triton's text when a version fails; what served before then still serves.
        """
        if not spec.versions:
            policy = f"policy of model '{spec.key}'"
            raise LoadError(spec.key, f"at least one version must be available under the version {policy}")
        operation, updated = self._begin_load(spec)
        try:
            self._finish_load(spec, operation, updated)
        finally:
            for model in updated.values():
                model.in_flight.leave()
            self._operations.leave()

    def _finish_load(self, spec: ModelSpec, operation: int, updated: Mapping[int, LoadedModel]) -> None:
        futures = {
            version: self._pool.submit(self._update, spec, updated[version])
            if version in updated
            else self._pool.submit(self._build, spec, version)
            for version in spec.versions
        }
        errors = {version: error for version, future in futures.items() if (error := error_of(future)) is not None}
        models = {version: future.result() for version, future in futures.items() if version not in errors}
        with self._lock:
            entry = self._models[spec.key]
            is_outdated = entry.operation != operation
            if is_outdated or errors:
                retired = [model for version, model in models.items() if version not in updated]
                if errors and not is_outdated:
                    self._mark_failed(entry, spec, errors)
            else:
                retired = self._swap(entry, spec, models)
            self._retire(retired)
        if spec.agents is not None:
            spec.agents.load_ended(not errors and not is_outdated, len(models))
        if is_outdated:
            raise LoadError(spec.key, f"{OUTDATED}\n")
        if errors:
            log.info("failed to load '%s'", spec.key)
            raise LoadError(spec.key, what_failed(errors, updated), tuple(errors.values()))
        log.info("successfully loaded '%s'", spec.key)

    def unload(self, name: str) -> None:
        """Begins to unload every version; unknown models are fine. In-flight requests run to their end."""
        with self._lock:
            entry = self._models.get(name)
            if entry is None:
                return
            entry.operation += 1
            entry.spec = None
            self._retire([model for version in entry.versions.values() if (model := stop_serving(version)) is not None])

    def refuse_loads(self) -> None:
        """From now on; those under way are not retried."""
        with self._lock:
            self._is_closing = True

    def close(self, timeout_s: float) -> bool:
        """Refuses new loads, unloads everything and waits until every model is finalised; False when time ran out."""
        self.refuse_loads()
        for name in self.names():
            self.unload(name)
        if not wait_until_unloaded(self.live_models, self._operations, timeout_s):
            return False
        self._pool.shutdown()
        return True

    def left_behind(self) -> dict[str, int]:
        """Counts that are 0 while nothing is loaded or unloaded."""
        with self._lock:
            versions = [version for entry in self._models.values() for version in entry.versions.values()]
            states = [version.state for version in versions]
            removals = sum(version.model.removal_count for version in versions if version.model is not None)
            return {
                "loads and unloads under way": self._operations.count,
                "model versions that drain": len(self._draining),
                "model versions in state LOADING": states.count(ModelState.LOADING),
                "model versions in state UNLOADING": states.count(ModelState.UNLOADING),
                "removed instances that still run": removals,
            }

    # --- inside -----------------------------------------------------------------------------------------------------

    def _begin_load(self, spec: ModelSpec) -> tuple[int, dict[int, LoadedModel]]:
        """The number of the operation, and the serving versions that are to be changed in place: their `in_flight` is
        entered, so that nobody finalises them meanwhile."""
        with self._lock:
            if self._is_closing:
                raise unavailable(STOPPING)
            self._operations.enter()
            entry = self._models.setdefault(spec.key, ModelEntry({}))
            entry.operation += 1
            for number in spec.versions:
                version = entry.versions.setdefault(number, VersionEntry())
                if version.state is not ModelState.READY:
                    entry.versions[number] = VersionEntry(ModelState.LOADING)
            found = {number: _updatable(entry.versions[number], spec) for number in spec.versions}
            updated = {number: model for number, model in found.items() if model is not None}
            for model in updated.values():
                model.in_flight.enter()
            return entry.operation, updated

    def _update(self, spec: ModelSpec, model: LoadedModel) -> LoadedModel:
        log.info("loading: %s:%d", spec.key, model.version)  # as Triton
        try:
            model.update_instances(spec)
        except Exception as error:
            log.error("failed to update '%s' version %d: %s", spec.key, model.version, as_triton_error(error).status)
            raise
        return model

    def _build(self, spec: ModelSpec, version: int) -> LoadedModel:
        log.info("loading: %s:%d", spec.key, version)
        for attempt in range(self._retries + 1):
            try:
                return self._make_model(spec, version)
            except Exception as error:
                status = as_triton_error(error).status
                log.error("failed to load '%s' version %d: %s", spec.key, version, status)
                if attempt == self._retries or self._is_closing:
                    raise
        raise AssertionError("unreachable")

    def _mark_failed(self, entry: ModelEntry, spec: ModelSpec, errors: dict[int, TritonError]) -> None:
        for number in spec.versions:
            version = entry.versions[number]
            if version.model is None:
                version.state = ModelState.UNAVAILABLE
                version.reason = errors[number].status if number in errors else UNLOADED

    def _swap(self, entry: ModelEntry, spec: ModelSpec, models: dict[int, LoadedModel]) -> list[LoadedModel]:
        """Puts the new models in place; what they replace, and versions no longer wanted, are to be retired."""
        retired: list[LoadedModel] = []
        for number, version in entry.versions.items():
            if number in models:
                if version.model is not None and version.model is not models[number]:
                    retired.append(version.model)
                entry.versions[number] = VersionEntry(ModelState.READY, model=models[number])
            elif (model := stop_serving(version)) is not None:
                retired.append(model)
        entry.spec = spec
        return retired

    def _retire(self, models: Sequence[LoadedModel]) -> None:
        """Waits for each model's last request and finalises it, on a thread of its own. Holds the lock, so that a model
        is seen serving or draining at any time."""
        for model in models:
            self._operations.enter()
            self._draining.add(model)
            threading.Thread(target=self._drain, args=(model,), name=f"unload-{model.name}", daemon=True).start()

    def _drain(self, model: LoadedModel) -> None:
        agents = model.spec.agents
        if agents is not None:
            agents.unloading()
        try:
            wait_for_last_request(model)
            model.finalize()
            log.info("successfully unloaded '%s' version %d", model.key, model.version)
        except Exception:
            log.exception("failed to unload '%s' version %d", model.key, model.version)
        with self._lock:
            self._draining.discard(model)
            for version in self._models[model.key].versions.values():
                if version.model is model:
                    version.model = None
                    version.state, version.reason = ModelState.UNAVAILABLE, UNLOADED
        if agents is not None:
            agents.version_unloaded()
        self._operations.leave()


def _updatable(version: VersionEntry, spec: ModelSpec) -> LoadedModel | None:
    """The model of a serving version that becomes that of `spec` by other instances alone."""
    model = version.model
    if model is None or version.state is not ModelState.READY or not model.is_elastic:
        return None
    return model if is_update(model.spec, spec, model.version) else None
