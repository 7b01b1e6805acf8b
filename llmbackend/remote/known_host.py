"""KnownHost: what a frontend knows of a host, and looks up there as the host does.

For: RemoteServer. Does not know: links. Invariants: the same answers and errors as the host's own at the time when it
told its state; what has not changed since the state before is the same object.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmbackend.core.errors import TritonError
from llmbackend.core.lifecycle.model_versions import ready_version
from llmbackend.core.messages import ModelMetadata
from llmbackend.core.models.served_config import Description
from llmbackend.core.repository.model_names import ModelNames
from llmbackend.core.served_models import ModelRow, ModelTable

from .wire import HostState, decode_models


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One READY version."""

    description: Description
    is_decoupled: bool
    resumes: bool


class KnownHost:
    def __init__(self, state: HostState, before: KnownHost | None = None) -> None:
        """before: as it was known so far"""
        self.state = state
        if before is not None and bytes(before.state.models) == bytes(state.models):
            self._models: _Models = before._models
        else:
            self._models = _Models(decode_models(state.models))

    def find(self, name: str, version: int = -1) -> KnownModel | None:
        """None where the host does not serve it."""
        try:
            return self.get(name, version)
        except TritonError:
            return None

    def get(self, name: str, version: int = -1) -> KnownModel:
        """Raises TritonError as ServedModels.get."""
        row, number = self._models.find(name, version)
        return KnownModel(row.descriptions[number], number in row.decoupled, row.resumes)

    def metadata(self, name: str, version: int = -1) -> ModelMetadata:
        """Raises TritonError as ServedModels.metadata."""
        row, number = self._models.find(name, version)
        return row.descriptions[number].metadata([number] if version >= 0 else sorted(row.descriptions))


class _Models:
    def __init__(self, table: ModelTable) -> None:
        self._rows: dict[str, ModelRow] = {row.key: row for row in table.rows}
        self._names = ModelNames(table.is_namespacing)
        for row in table.rows:
            self._names.add(row.name, row.key)

    def find(self, name: str, version: int) -> tuple[ModelRow, int]:
        key = self._names.key(name)
        row = self._rows.get(key)
        number = ready_version(key, version, None if row is None else row.states)
        assert row is not None, "an unknown model has no version"
        return row, number
