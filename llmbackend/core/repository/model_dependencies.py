"""Which ensembles are made of which models: the order to load them in, and which ones a change of a model affects.

For: model loading. Does not know: how a model is loaded, states of versions. Owner of the specification of every
ensemble that was requested, also while a missing composing model keeps it from serving, so that it can be loaded when
that model comes. Invariants: only ensembles depend on models; no load order contains a circle; what was unloaded by
name is forgotten. Source: the dependency graph of Triton's model_repository_manager.cc.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping

from llmbackend.core.config.model_config_rules import composing_models

from .model_repository import ModelSpec

Parts = Mapping[str, Collection[str]]
"""A model's key → the keys of the models it is made of."""


def parts_of(specs: Mapping[str, ModelSpec]) -> dict[str, list[str]]:
    return {name: list(composing_models(spec.config)) for name, spec in specs.items()}


def circles(parts: Parts) -> dict[str, str]:
    """By model: why one that depends on itself cannot be loaded, in Triton's words and with the names that Triton
    gives, which are not always those of the model itself."""
    reasons: dict[str, str] = {}

    def search(current: str, start: str, seen: set[str]) -> str:
        for part in parts.get(current, ()):
            if part == start:
                return f"circular dependency between ensembles: {start} -> ... -> {current} -> {start}"
            if part not in seen:
                seen.add(part)
                reason = search(part, start, seen)
                if reason:
                    reasons[current] = reason
                    return reason
        return ""

    for name in sorted(parts):
        if name not in reasons and (reason := search(name, name, {name})):
            reasons[name] = reason
    return reasons


def in_levels(names: Iterable[str], parts: Parts) -> list[list[str]]:
    """`names` in groups, each model after all that it is made of; the members of a circle are in one group."""
    waiting = sorted(set(names))
    in_circles = circles(parts)
    levels = []
    while waiting:
        level = [name for name in waiting if not any(part in waiting for part in parts.get(name, ()))]
        level = level or [name for name in waiting if name in in_circles]
        levels.append(level)
        waiting = [name for name in waiting if name not in level]
    return levels


class ModelDependencies:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ensembles: dict[str, ModelSpec] = {}
        self._explicit: set[str] = set()

    def remember(self, specs: Iterable[ModelSpec], explicit: Collection[str]) -> None:
        """Records models that are about to be loaded. explicit: keys requested by name, not as composing models."""
        with self._lock:
            for spec in specs:
                if spec.key in explicit:
                    self._explicit.add(spec.key)
                if spec.config.HasField("ensemble_scheduling"):
                    self._ensembles[spec.key] = spec
                else:
                    self._ensembles.pop(spec.key, None)

    def spec(self, name: str) -> ModelSpec | None:
        """The specification of a recorded ensemble."""
        with self._lock:
            return self._ensembles.get(name)

    def forget(self, name: str, with_parts: bool) -> list[str]:
        """The models to unload for `name`: itself and, with_parts, composing models that no ensemble needs and that
        were not requested by name."""
        with self._lock:
            removed = [name]
            for model in removed:
                spec = self._ensembles.pop(model, None)
                self._explicit.discard(model)
                if spec is not None and with_parts:
                    removed += [part for part in composing_models(spec.config) if self._is_idle(part, removed)]
            return removed

    def affected_by(self, names: Collection[str]) -> list[str]:
        """The ensembles that are made of any of `names`, directly or not, each after those that it is made of."""
        with self._lock:
            parts = parts_of(self._ensembles)
        affected: set[str] = set()
        front = set(names)
        while front:
            front = {name for name, its in parts.items() if front.intersection(its)} - affected - set(names)
            affected |= front
        return [name for level in in_levels(affected, parts) for name in level]

    def _is_idle(self, name: str, removed: Collection[str]) -> bool:
        needed = any(name in composing_models(spec.config) for spec in self._ensembles.values())
        return not needed and name not in self._explicit and name not in removed
