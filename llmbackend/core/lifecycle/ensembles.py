"""Ensembles and their composing models: load order, the effects of a model's change, validation.

Source: ValidateEnsembleConfig in Triton's ensemble_utils.cc; CheckNode, ConnectDependencyGraph and the dependency graph
in its model_repository_manager.cc.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelEnsembling, ModelInput, ModelOutput

from ..config.model_config_rules import composing_models
from ..errors import TritonError, invalid_argument
from ..repository.model_files import ModelIdentifier
from ..repository.model_repository import ModelSpec
from ..scheduling.ensembles.graph import dims_compatible
from ..tensors import shape_text
from .model_versions import ModelVersions


@dataclass
class Faults:
    """The faults found so far during one load, by model key.

    missing: models that are in no repository
    failed: models that failed to load, with the reason
    invalid: ensembles that cannot serve, with the reason
    """

    missing: Collection[str]
    failed: dict[str, str] = field(default_factory=dict)
    invalid: dict[str, str] = field(default_factory=dict)

    def of(self, part: str, versions: Collection[int], ready: Collection[int]) -> str:
        """Why an ensemble cannot use `versions` (-1 = any) of a model with the READY versions `ready`; "" = it can."""
        if part in self.invalid:
            return f"which is not valid. Model '{part}' failed with error: {self.invalid[part]}"
        if not ready and part in self.failed:
            return f"which has no loaded version. Model '{part}' loading failed with error: {self.failed[part]}"
        if not ready:
            return "which has no loaded version."
        absent = [version for version in sorted(versions) if version != -1 and version not in ready]
        return f"whose required version {absent[-1]} is not loaded." if absent else ""


def validate_ensemble(spec: ModelSpec, versions: ModelVersions, faults: Faults) -> str:
    """Why the ensemble cannot serve. "" = it can, and `decoupled` is set in its configuration."""
    parts = composing_models(spec.config)
    ready = {part: versions.ready_versions(part) for part in parts}
    for part in parts:
        if part in faults.missing and not ready[part]:
            return f"ensemble {spec.key} contains models that are not available or ambiguous: {part}"
    for part, wanted in parts.items():
        fault = faults.of(part, wanted, ready[part])
        if fault:
            return f"ensemble '{spec.key}' depends on '{part}' {fault}"
    try:
        configs = {part: versions.get(ModelIdentifier(part)).config for part in parts}
        is_decoupled = check_tensors(spec.config, configs)
    except TritonError as error:
        return error.message
    spec.config.model_transaction_policy.decoupled = is_decoupled
    return ""


@dataclass(eq=False)
class _Node:
    """A tensor of the ensemble, as declared by the first model that names it.

    label: number of the decoupled step that its values come from, 0 = none; a step must not mix values with different
        labels, because it is unknown which of them belong together
    sibling: shared by all outputs of a step
    """

    model: str
    data_type: int = 0
    dims: tuple[int, ...] = ()
    full_dims: tuple[int, ...] = ()  # including the batch dimension
    is_decoupled: bool = False
    label: int = 0
    is_visited: bool = False
    before: list[_Node] = field(default_factory=list)
    after: list[_Node] = field(default_factory=list)
    sibling: _Node | None = None


def check_tensors(config: ModelConfig, composing: Mapping[str, ModelConfig]) -> bool:
    """Whether the ensemble is decoupled. Raises TritonError INVALID_ARG if its tensors do not match those of the
    `composing` models (by name)."""
    batches = config.max_batch_size > 0
    nodes = {tensor.name: _node(config.name, tensor, batches) for tensor in config.input}
    sink = _Node(config.name)
    for tensor in config.output:
        output = nodes.setdefault(tensor.name, _node(config.name, tensor, batches))
        sink.before.append(output)
        output.after.append(sink)
    for step in config.ensemble_scheduling.step:
        model = composing[step.model_name]
        if model.max_batch_size and model.max_batch_size < config.max_batch_size:
            raise invalid_argument(
                f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
                f"{step.model_name} which only allows maximum batch size to be {model.max_batch_size}"
            )
        _check_inputs(config.name, step, model, nodes)
        _check_outputs(config.name, step, model, nodes)
        _link(step, model, nodes)
    return _decoupled_labels(config, nodes) > 0


def _node(model: str, tensor: ModelInput | ModelOutput, batches: bool, with_reshape: bool = True) -> _Node:
    reshaped = with_reshape and tensor.HasField("reshape")
    dims = tuple(tensor.reshape.shape if reshaped else tensor.dims)
    return _Node(model, tensor.data_type, dims, (-1, *dims) if batches else dims)


def _check_inputs(ensemble: str, step: ModelEnsembling.Step, model: ModelConfig, nodes: dict[str, _Node]) -> None:
    known = {tensor.name for tensor in model.input}
    for name, tensor_name in sorted(step.input_map.items()):
        if name not in known:
            raise invalid_argument(
                f"in ensemble {ensemble}, ensemble tensor {tensor_name} is mapping to non-existing input {name} in "
                f"model {step.model_name}"
            )
    for tensor in model.input:
        if tensor.name in step.input_map:
            _matching(ensemble, step.input_map[tensor.name], _model_node(step, model, tensor), nodes)
        elif not tensor.optional:
            raise invalid_argument(
                f"in ensemble {ensemble}, input {tensor.name} in model {step.model_name} is not mapped to any "
                f"ensemble tensors"
            )


def _check_outputs(ensemble: str, step: ModelEnsembling.Step, model: ModelConfig, nodes: dict[str, _Node]) -> None:
    outputs = {tensor.name: tensor for tensor in model.output}
    for name, tensor_name in sorted(step.output_map.items()):
        if name not in outputs:
            raise invalid_argument(
                f"in ensemble {ensemble}, ensemble tensor {tensor_name} is mapped from non-existing output {name} in "
                f"model {step.model_name}"
            )
    sibling = _Node(step.model_name)
    for name, tensor_name in sorted(step.output_map.items()):
        _matching(ensemble, tensor_name, _model_node(step, model, outputs[name]), nodes).sibling = sibling


def _model_node(step: ModelEnsembling.Step, model: ModelConfig, tensor: ModelInput | ModelOutput) -> _Node:
    return _node(step.model_name, tensor, model.max_batch_size > 0, with_reshape=False)


def _matching(ensemble: str, tensor: str, found: _Node, nodes: dict[str, _Node]) -> _Node:
    """The node of the ensemble's `tensor`, after checking that `found` matches. Requests check variable sizes."""
    known = nodes.setdefault(tensor, found)
    prefix = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
    if known.data_type != found.data_type:
        raise invalid_argument(
            f"{prefix}inconsistent data type: {DataType.Name(known.data_type)} is inferred from model {known.model} "
            f"while {DataType.Name(found.data_type)} is inferred from model {found.model}"
        )
    if not dims_compatible(known.dims, found.dims) and not dims_compatible(known.full_dims, found.full_dims):
        raise invalid_argument(
            f"{prefix}inconsistent shape: {shape_text(known.full_dims)} is inferred from model {known.model} while "
            f"{shape_text(found.full_dims)} is inferred from model {found.model}"
        )
    return known


def _link(step: ModelEnsembling.Step, model: ModelConfig, nodes: Mapping[str, _Node]) -> None:
    for output in step.output_map.values():
        node = nodes[output]
        node.is_decoupled = model.model_transaction_policy.decoupled
        for source in step.input_map.values():
            node.before.append(nodes[source])
            nodes[source].after.append(node)


def _decoupled_labels(config: ModelConfig, nodes: Mapping[str, _Node]) -> int:
    """Counts the decoupled steps. Raises TritonError INVALID_ARG for a step that mixes values of several of them."""
    labels = 0
    ready = deque(nodes[tensor.name] for tensor in config.input)
    for node in ready:
        node.is_visited = True
    while ready:
        for node in ready.popleft().after:
            if node.is_visited or not all(before.is_visited for before in node.before):
                continue
            label = _common_label(config.name, node.before, node.model)
            if node.is_decoupled and not (node.sibling is not None and node.sibling.is_visited):
                labels += 1
                label = labels
            if node.sibling is not None:
                node.label = node.sibling.label if node.sibling.is_visited else label
                node.sibling.label, node.sibling.is_visited = node.label, True
            else:
                node.label = label
            node.is_visited = True
            ready.append(node)
    return labels


def _common_label(ensemble: str, before: Iterable[_Node], model: str) -> int:
    labels = {node.label for node in before}
    if len(labels) > 1:
        raise invalid_argument(
            f"in ensemble {ensemble}, step of model '{model}' receives inputs originated from different decoupled "
            f"models"
        )
    return labels.pop()


Parts = Mapping[str, Collection[str]]
"""A model's key → the keys of its composing models."""


def parts_of(specs: Mapping[str, ModelSpec]) -> dict[str, list[str]]:
    return {name: list(composing_models(spec.config)) for name, spec in specs.items()}


def dependency_cycles(parts: Parts) -> dict[str, str]:
    """Triton's error text for each model that depends on itself. The text does not always name that model."""
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


def dependency_levels(names: Iterable[str], parts: Parts) -> list[list[str]]:
    """`names` in groups such that models follow their composing models; the members of a cycle form one group."""
    waiting = sorted(set(names))
    in_cycles = dependency_cycles(parts)
    levels = []
    while waiting:
        level = [name for name in waiting if not any(part in waiting for part in parts.get(name, ()))]
        level = level or [name for name in waiting if name in in_cycles]
        levels.append(level)
        waiting = [name for name in waiting if name not in level]
    return levels


class ModelDependencies:
    """Remembers ensembles, and which models were requested by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ensembles: dict[str, ModelSpec] = {}
        self._explicit: set[str] = set()

    def remember(self, specs: Iterable[ModelSpec], explicit: Collection[str]) -> None:
        """Records models before their load. explicit: keys of those requested by name not as composing models."""
        with self._lock:
            for spec in specs:
                if spec.key in explicit:
                    self._explicit.add(spec.key)
                if spec.config.HasField("ensemble_scheduling"):
                    self._ensembles[spec.key] = spec
                else:
                    self._ensembles.pop(spec.key, None)

    def spec(self, name: str) -> ModelSpec | None:
        with self._lock:
            return self._ensembles.get(name)

    def forget(self, name: str, with_parts: bool) -> list[str]:
        """The models to unload with `name`: itself and, if with_parts, composing models that no ensemble needs and that
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
        """The ensembles that contain any of `names`, directly or indirectly, each after its composing models."""
        with self._lock:
            parts = parts_of(self._ensembles)
        affected: set[str] = set()
        front = set(names)
        while front:
            front = {name for name, its in parts.items() if front.intersection(its)} - affected - set(names)
            affected |= front
        return [name for level in dependency_levels(affected, parts) for name in level]

    def _is_idle(self, name: str, removed: Collection[str]) -> bool:
        needed = any(name in composing_models(spec.config) for spec in self._ensembles.values())
        return not needed and name not in self._explicit and name not in removed
