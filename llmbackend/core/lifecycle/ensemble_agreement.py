"""Whether an ensemble and its composing models mean the same tensors, and whether it is decoupled.

For: ensemble_fitness.py, once the composing models serve. Does not know: requests, how models are loaded. Invariant:
after the check every tensor of the ensemble has one type, and shapes that can be the same; whether the ensemble is
decoupled follows from its steps, whatever it says.
Source: ValidateEnsembleConfig in Triton's ensemble_utils.cc.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelEnsembling, ModelInput, ModelOutput

from llmbackend.core.errors import invalid_argument
from llmbackend.core.scheduling.ensembles.ensemble_shapes import dims_agree


@dataclass(eq=False)
class _Node:
    """A tensor of the ensemble as the first model that names it sees it. `label` numbers the decoupled model that its
    values come from, 0 = none: a step must not mix values of different ones, since nothing says which belong together.
    """

    model: str
    data_type: int = 0
    dims: tuple[int, ...] = ()
    full_dims: tuple[int, ...] = ()
    is_decoupled: bool = False
    label: int = 0
    is_visited: bool = False
    before: list[_Node] = field(default_factory=list)
    after: list[_Node] = field(default_factory=list)
    sibling: _Node | None = None  # shared by all outputs of a step


def check_agreement(config: ModelConfig, composing: Mapping[str, ModelConfig]) -> bool:
    """Whether the ensemble is decoupled. Raises TritonError INVALID_ARG when it does not fit its composing models."""
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
            _agree(ensemble, step.input_map[tensor.name], _model_node(step, model, tensor), nodes)
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
        _agree(ensemble, tensor_name, _model_node(step, model, outputs[name]), nodes).sibling = sibling


def _model_node(step: ModelEnsembling.Step, model: ModelConfig, tensor: ModelInput | ModelOutput) -> _Node:
    return _node(step.model_name, tensor, model.max_batch_size > 0, with_reshape=False)


def _agree(ensemble: str, tensor: str, found: _Node, nodes: dict[str, _Node]) -> _Node:
    """The ensemble's `tensor`, which can be what `found` says. Variable sizes are checked at each request."""
    known = nodes.setdefault(tensor, found)
    prefix = f"in ensemble {ensemble}, ensemble tensor {tensor}: "
    if known.data_type != found.data_type:
        raise invalid_argument(
            f"{prefix}inconsistent data type: {DataType.Name(known.data_type)} is inferred from model {known.model} "
            f"while {DataType.Name(found.data_type)} is inferred from model {found.model}"
        )
    if not dims_agree(known.dims, found.dims) and not dims_agree(known.full_dims, found.full_dims):
        raise invalid_argument(
            f"{prefix}inconsistent shape: {_shown(known.full_dims)} is inferred from model {known.model} while "
            f"{_shown(found.full_dims)} is inferred from model {found.model}"
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
    """How many decoupled steps the flow goes through. Raises TritonError INVALID_ARG for a step that mixes them."""
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


def _shown(dims: tuple[int, ...]) -> str:
    return f"[{','.join(str(dim) for dim in dims)}]"
