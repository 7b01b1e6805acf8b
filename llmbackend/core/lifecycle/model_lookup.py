"""Every version of every model as it is now: who serves, who drains, in which state and why.

For: the life cycle, which changes it, and whoever asks. Does not know: operations, threads that load. Invariant: what
it says was true at one moment; a model that serves or may hold requests is found at any time.
"""

from __future__ import annotations

import threading

from llmbackend.core.models.model import LoadedModel
from llmbackend.core.repository.model_names import ModelIdentifier
from llmbackend.core.repository.model_repository import ModelSpec

from .model_versions import ModelEntry, ModelState, ready_model


class ModelLookup:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[str, ModelEntry] = {}
        self._draining: set[LoadedModel] = set()

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._models)

    def versions(self, name: str) -> dict[int, tuple[ModelState, str]]:
        """State and reason of each known version, ascending; {} for a model that was never loaded."""
        with self._lock:
            entry = self._models.get(name)
            versions = entry.versions if entry is not None else {}
            return {number: (version.state, version.reason) for number, version in sorted(versions.items())}

    def loaded_spec(self, name: str) -> ModelSpec | None:
        """What the serving versions were loaded from; None when nothing serves."""
        with self._lock:
            entry = self._models.get(name)
            return entry.spec if entry is not None else None

    def acquire(self, name: ModelIdentifier, version: int = -1) -> LoadedModel:
        """A READY model with its `in_flight` entered; the caller leaves it. -1 = the highest READY version.

        Raises TritonError NOT_FOUND or UNAVAILABLE with Triton's texts.
        """
        with self._lock:
            model = ready_model(self._models, name, version)
            model.in_flight.enter()
            return model

    def get(self, name: ModelIdentifier, version: int = -1) -> LoadedModel:
        """As `acquire`, for those who only read what stays valid after an unload."""
        with self._lock:
            return ready_model(self._models, name, version)

    def ready_models(self, name: ModelIdentifier | None = None) -> list[LoadedModel]:
        """Every serving version (of one model, or of all), sorted by name and version."""
        with self._lock:
            found = [
                version.model
                for model_name, entry in self._models.items()
                for version in entry.versions.values()
                if version.model is not None and version.state is ModelState.READY and name in (None, model_name)
            ]
        return sorted(found, key=lambda model: (model.name, model.version))

    def live_models(self) -> list[LoadedModel]:
        """Serving and draining ones: all that may hold requests."""
        ready = self.ready_models()
        with self._lock:
            return ready + [model for model in self._draining if model not in ready]
