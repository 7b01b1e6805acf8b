"""The versions of a model and their states, and which of them serves.

For: the life cycle, whose lock guards all of it. Does not know: loading, threads. Invariant: a version READY or
UNLOADING has a model; of the versions READY, the highest serves requests that name none.
Source: Triton's model life cycle (reference §1.1, §1.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from llmbackend.core.errors import not_found, shown_name, unavailable
from llmbackend.core.models.model import LoadedModel
from llmbackend.core.repository.model_names import ModelIdentifier
from llmbackend.core.repository.model_repository import ModelSpec

UNLOADED = "unloaded"


class ModelState(Enum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass
class VersionEntry:
    """`model` serves while READY and drains while UNLOADING."""

    state: ModelState = ModelState.LOADING
    reason: str = ""
    model: LoadedModel | None = None


@dataclass
class ModelEntry:
    """`operation` counts loads and unloads of the model: an operation that finds it changed was overtaken."""

    versions: dict[int, VersionEntry]
    spec: ModelSpec | None = None
    operation: int = 0


def ready_model(models: Mapping[str, ModelEntry], name: ModelIdentifier, version: int) -> LoadedModel:
    """The READY model of that version, -1 = the highest. Raises TritonError NOT_FOUND or UNAVAILABLE with Triton's
    texts."""
    entry = models.get(name)
    if entry is None:
        raise not_found(f"{_unknown(name)} is not found")
    if version >= 0:
        found = entry.versions.get(version)
        if found is None:
            raise not_found(f"{_unknown(name)} version {version} is not found")
        if found.state is not ModelState.READY or found.model is None:
            raise unavailable(f"{_unknown(name)} version {version} is not at ready state")
        return found.model
    ready = [number for number, found in entry.versions.items() if found.state is ModelState.READY]
    model = entry.versions[max(ready)].model if ready else None
    if model is None:
        raise not_found(f"{_unknown(name)} has no available versions")
    return model


def _unknown(name: str) -> str:
    return f"Request for unknown model: '{shown_name(name)}'"


def stop_serving(version: VersionEntry) -> LoadedModel | None:
    """Takes a version out of service; the model that must be retired, if one served."""
    if version.state is ModelState.READY:
        version.state = ModelState.UNLOADING
        return version.model
    if version.state is ModelState.LOADING:
        version.state, version.reason = ModelState.UNAVAILABLE, UNLOADED
    return None
