"""One load: some models, brought into service level by level, each after the models that it is made of.

For: ModelLoader, which holds the locks of these models. Does not know: repositories, requests. Invariants: models of a
level load side by side; a model that is loaded and did not change is left alone, unless a part of it changed; an
ensemble that can not serve is taken out of service, and says why.
Source: LoadModelByDependency in Triton's model_repository_manager.cc.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from llmbackend.core.errors import TritonError
from llmbackend.core.repository.model_dependencies import circles, in_levels, parts_of
from llmbackend.core.repository.model_repository import ModelSpec

from .ensemble_fitness import EnsembleFitness
from .load_errors import LoadError
from .model_lifecycle import ModelLifecycle

log = logging.getLogger(__name__)


class LoadOperation:
    """Models go by their keys; `load` brings one into service. `changed` are those whose service began, changed or
    ended, `errors` those that could not be loaded."""

    def __init__(
        self,
        lifecycle: ModelLifecycle,
        load: Callable[[ModelSpec], None],
        specs: Mapping[str, ModelSpec],
        missing: Collection[str] = (),
        changed: Collection[str] = (),
    ) -> None:
        self.changed = set(changed)
        self.errors: dict[str, TritonError] = {}
        self._lifecycle = lifecycle
        self._load_spec = load
        self._specs = specs
        self._parts = parts_of(specs)
        self._circles = circles(self._parts)
        self._failed: dict[str, str] = {}
        self._invalid: dict[str, str] = {}
        self._fitness = EnsembleFitness(lifecycle, missing, self._invalid, self._failed)

    def run(self) -> None:
        for level in in_levels(self._specs, self._parts):
            if len(level) == 1:
                self._load(level[0])
                continue
            with ThreadPoolExecutor(len(level), thread_name_prefix="load") as pool:
                list(pool.map(self._load, level))

    def _load(self, name: str) -> None:
        spec = self._specs[name]
        reason = self._circles.get(name) or self._why_unfit(spec)
        if not reason and not self._is_current(spec):
            try:
                self._load_spec(spec)
            except TritonError as error:
                self._failed[name] = error.reason if isinstance(error, LoadError) else error.message
                self.errors[name] = error
                return
            self.changed.add(name)
            reason = self._why_unfit(spec)  # a part may have been unloaded meanwhile
        if reason:
            self._reject(name, reason)

    def _why_unfit(self, spec: ModelSpec) -> str:
        return self._fitness.why_unfit(spec) if self._parts[spec.key] else ""

    def _is_current(self, spec: ModelSpec) -> bool:
        loaded = self._lifecycle.loaded_spec(spec.key)
        is_same = loaded is not None and not spec.has_override and loaded.signature == spec.signature
        return is_same and self.changed.isdisjoint(self._parts[spec.key])

    def _reject(self, name: str, reason: str) -> None:
        log.error("%s", reason)
        if self._lifecycle.loaded_spec(name) is not None:
            self.changed.add(name)
        self._lifecycle.unload(name)
        self._invalid[name] = reason
        self.errors[name] = LoadError(name, f"{reason}\n")
