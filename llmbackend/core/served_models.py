"""Readiness, metadata and statistics of models, the repository index, and the tables logged at startup.

Source: PrintBackendAndModelSummary in Triton's server.cc; golden transcript 57.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tritonclient.grpc.service_pb2 import ModelStatistics

from .errors import TritonError, invalid_argument
from .lifecycle.model_versions import UNLOADED, ModelReadyState, ModelVersions
from .messages import ModelIndex, ModelMetadata
from .metrics.nv_metrics import VersionReadiness
from .models.model import LoadedModel
from .models.served_config import Description
from .repository.model_files import ModelIdentifier, ModelNames
from .repository.model_repository import DUPLICATE, ModelRepository

log = logging.getLogger(__name__)

NO_VERSION = "Not loaded: No model version was found"
SCRAPE_ANSWER_S = 0.5
_WAS_UNLOADED = (ModelReadyState.UNAVAILABLE, UNLOADED)


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model of a ModelTable.

    descriptions: of READY versions
    decoupled: the decoupled versions
    resumes: whether the model's requests are resumable
    """

    key: str
    name: str
    states: Mapping[int, ModelReadyState]
    descriptions: Mapping[int, Description]
    decoupled: Sequence[int]
    resumes: bool
    served_names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ModelTable:
    """The models of a host, in the form that a frontend in another process needs."""

    is_namespacing: bool
    rows: Sequence[ModelRow]


class ServedModels:
    def __init__(self, versions: ModelVersions, names: ModelNames, repository: ModelRepository) -> None:
        self._versions = versions
        self._names = names
        self._repository = repository

    def get(self, name: str, version: int = -1) -> LoadedModel:
        """The READY model that clients mean by `name`; -1 = the highest READY version. Of the model, use only what
        remains valid after an unload. Raises TritonError NOT_FOUND or UNAVAILABLE with Triton's texts, INVALID_ARG for
        an ambiguous name."""
        return self._versions.get(self._names.key(name), version)

    def live_versions(self, name: str, version: int = -1) -> list[LoadedModel]:
        """The versions (-1 = all) of a model, by name or key, that may have requests. If there are none or the name is
        ambiguous, raises the errors of `get`."""
        live = [model for model in self._versions.live_models() if version in (-1, model.version)]
        keys = {model.key for model in live if name in (model.name, model.key)}
        key = keys.pop() if len(keys) == 1 else self.get(name, version).key
        return [model for model in live if model.key == key]

    def all_are_ready(self) -> bool:
        """Whether every known model has versions, each READY with ready instances, or unloaded."""
        for key in self._versions.names():
            states = self._states(key)
            if not states:
                return False
            for state, reason in states.values():
                if state is not ModelReadyState.READY and (state, reason) != _WAS_UNLOADED:
                    return False
        return True

    def is_ready(self, name: str, version: int = -1) -> bool:
        """False also for an unknown model. Returns within seconds even if a backend hangs."""
        try:
            return not self.get(name, version).not_ready_reason()
        except TritonError:
            return False

    def readinesses(self) -> list[VersionReadiness]:
        """The readiness of all known versions except those unloaded or being unloaded. Each version whose backend hangs
        delays this by at most half a second, so that a scrape still gets the other metrics."""
        found = []
        for key in self._versions.names():
            name, namespace = self._names.plain(key), self._names.namespace(key)
            for number, (state, reason) in self._states(key, SCRAPE_ANSWER_S).items():
                if state is not ModelReadyState.UNLOADING and (state, reason) != _WAS_UNLOADED:
                    found.append(VersionReadiness(name, number, namespace, state is ModelReadyState.READY))
        return found

    def table(self) -> ModelTable:
        ready = {(model.key, model.version): model for model in self._versions.ready_models()}
        rows = []
        for key in self._versions.names():
            states = self._versions.states(key)
            served = {
                number: model for number in states if (model := ready.get((ModelIdentifier(key), number))) is not None
            }
            rows.append(
                ModelRow(
                    key,
                    self._names.plain(key),
                    {number: _reported(state, number in served) for number, (state, _) in states.items()},
                    {number: model.description for number, model in served.items()},
                    [number for number, model in served.items() if model.answers_decoupled],
                    all(model.backend.resumes for model in served.values()),
                    self._names.served_names(key),
                )
            )
        return ModelTable(self._names.is_namespacing, rows)

    def metadata(self, name: str, version: int = -1) -> ModelMetadata:
        model = self.get(name, version)
        versions = [model] if version >= 0 else self._versions.ready_models(model.key)
        return model.description.metadata(each.version for each in versions)

    def statistics(self, name: str = "", version: int = -1) -> list[ModelStatistics]:
        """The statistics of READY versions; "" = of all models. Raises TritonError INVALID_ARG for a model or version
        that is not READY."""
        keys = self._names.keys(name) if name else [None]
        models = self._versions.ready_models(keys[0]) if len(keys) == 1 else []
        if name and not models:
            raise invalid_argument(f"requested model '{name}' is not available")
        if name and version >= 0:
            models = [model for model in models if model.version == version]
            if not models:
                raise invalid_argument(f"requested model version is not available for model '{name}'")
        return [self._statistics_of(model) for model in models]

    def _statistics_of(self, model: LoadedModel) -> ModelStatistics:
        message = model.statistics.snapshot(model.name, model.version)
        for instance in model.instances:
            for usage in instance.memory_usage():
                message.memory_usage.add(type=usage.type.value, id=usage.device_id, byte_size=usage.byte_size)
        return message

    def repository_index(self, ready_only: bool = False) -> list[ModelIndex]:
        """All models in the repositories with the states of their known versions, sorted by name. As in Triton, models
        that were loaded and have no version are omitted."""
        rows: list[ModelIndex] = []
        known = set(self._versions.names())
        for key, sources in self._repository.listing().items():
            name, states = sources[0].name, self._states(key)
            if len(sources) > 1:
                rows.append(ModelIndex(name, "", ModelReadyState.UNAVAILABLE.value, DUPLICATE))
                continue
            if key not in known:
                rows.append(ModelIndex(name))
            for number, (state, reason) in states.items():
                rows.append(ModelIndex(name, str(number), state.value, reason))
        return [row for row in rows if not ready_only or row.state == ModelReadyState.READY.value]

    def _states(self, key: str, timeout_s: float | None = None) -> dict[int, tuple[ModelReadyState, str]]:
        """State and reason of each known version; UNAVAILABLE if its backend reports that it is not ready."""
        states = self._versions.states(key)
        for number, (state, _) in states.items():
            if state is ModelReadyState.READY and (reason := self._reason(key, number, timeout_s)):
                states[number] = (ModelReadyState.UNAVAILABLE, reason)
        return states

    def _reason(self, key: str, version: int, timeout_s: float | None) -> str:
        try:
            return self._versions.get(ModelIdentifier(key), version).not_ready_reason(timeout_s)
        except TritonError as error:
            return error.message  # unloaded in the meantime


def _reported(state: ModelReadyState, is_served: bool) -> ModelReadyState:
    """LOADING for a version that became READY after `ready_models` was read."""
    return ModelReadyState.LOADING if state is ModelReadyState.READY and not is_served else state


def log_summary(agents: Iterable[Sequence[str]], backends: Iterable[Sequence[str]], versions: ModelVersions) -> None:
    """Logs Triton's three tables after startup: repository agents, backends, models."""
    for text in (
        _table(("Repository Agent", "Path"), agents),
        _table(("Backend", "Path", "Config"), backends),
        _table(("Model", "Version", "Status"), _model_rows(versions)),
    ):
        log.info("\n%s", text, extra={"is_table": True})  # the log does not escape line ends in tables


def _model_rows(versions: ModelVersions) -> Iterable[tuple[str, str, str]]:
    for name in versions.names():
        states = versions.states(name)
        if not states:
            yield name, "-", NO_VERSION
        for number, (state, reason) in states.items():
            yield name, str(number), f"{state.value}: {reason}" if reason else state.value


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in (head, *cells)) for column in range(len(head))]
    rule = "".join(f"+{'-' * (width + 2)}" for width in widths) + "+"
    lines = [_line(row, widths) for row in (head, *cells)]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule, ""])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"| {cell:<{width}} " for cell, width in zip(row, widths, strict=True)) + "|"
