"""The data flow of an ensemble, read once from its configuration: which step reads and writes which tensor.

For: the ensemble scheduler, its runs, and the check of an ensemble before it is loaded. Does not know: requests, models
that serve. Invariant: a flow holds exactly the steps that the requested outputs need.
Source: EnsembleInfo, the pruning and ReshapeTensorDims of Triton's ensemble_scheduler.cc.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.messages import RequestFlag
from llmbackend.core.tensors import Tensor, reshaped

ModelKey = tuple[str, int]
"""Name and version of a composing model; version -1 = the highest READY one."""
Origin = tuple[int, ...]
"""The index of the response of each decoupled step that a value comes from, the first step first. () = the request
itself. Origins compare in the order in which their responses would come if every step took no time."""
SequenceTag = tuple[int | str, RequestFlag]
"""Correlation id and flags, which travel with the tensors that a step wrote."""


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step of the configuration.

    index: its place in the configuration
    inputs, outputs: the model's names of tensors → the ensemble's names
    """

    index: int
    model: ModelKey
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Flow:
    """What has to run for some outputs.

    readers: the steps that read each tensor
    uses: how often each value of a tensor is taken, by steps and by the response

    By design different from Triton: an output that was not asked for but is read by a step that is needed keeps the
    step that writes it.
    """

    readers: Mapping[str, tuple[EnsembleStep, ...]]
    uses: Mapping[str, int]


class EnsembleGraph:
    def __init__(self, config: ModelConfig) -> None:
        scheduling = config.ensemble_scheduling
        self.name = config.name
        self.is_decoupled = config.model_transaction_policy.decoupled
        self.max_inflight_requests = scheduling.max_inflight_requests
        self.optional_inputs = tuple(tensor.name for tensor in config.input if tensor.optional)
        self.output_dims = {
            tensor.name: tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
            for tensor in config.output
        }
        self.steps = tuple(
            EnsembleStep(
                index,
                (step.model_name, step.model_version),
                dict(sorted(step.input_map.items())),
                dict(sorted(step.output_map.items())),
            )
            for index, step in enumerate(scheduling.step)
        )
        self.models = tuple(dict.fromkeys(step.model for step in self.steps))
        self._writer = {tensor: step for step in self.steps for tensor in step.outputs.values()}
        self._whole = self._flow(self.output_dims)

    def flow(self, requested: Iterable[str]) -> Flow:
        """The flow that makes the `requested` outputs."""
        names = frozenset(requested)
        return self._whole if names == self.output_dims.keys() else self._flow(names)

    def _flow(self, requested: Iterable[str]) -> Flow:
        needed: dict[int, EnsembleStep] = {}
        wanted = list(requested)
        uses = Counter(wanted)
        while wanted:
            step = self._writer.get(wanted.pop())
            if step is not None and step.index not in needed:
                needed[step.index] = step
                wanted.extend(step.inputs.values())
        readers: dict[str, tuple[EnsembleStep, ...]] = {}
        for _, step in sorted(needed.items()):
            for tensor in set(step.inputs.values()):
                readers[tensor] = (*readers.get(tensor, ()), step)
                uses[tensor] += 1
        return Flow(readers, uses)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What an ensemble needs to know of a composing model. input_dims: without the batch dimension, -1 = any size."""

    is_batching: bool
    is_decoupled: bool
    input_dims: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShapes:
        dims = {tensor.name: tuple(tensor.dims) for tensor in config.input}
        return cls(config.max_batch_size > 0, config.model_transaction_policy.decoupled, dims)


def dims_agree(some: Sequence[int], others: Sequence[int]) -> bool:
    """Whether both can be the same shape; -1 stands for any size. Source: CompareDimsWithWildcard."""
    return len(some) == len(others) and all(
        one == other or -1 in (one, other) for one, other in zip(some, others, strict=True)
    )


def passed_on(tensor: Tensor, name: str, batch_size: int, dims: Sequence[int], is_batching: bool) -> Tensor:
    """`tensor` as the tensor `name` of another model, which has `dims` for it. batch_size: of the request that made it,
    0 = its model does not batch."""
    shape = tensor.shape
    if is_batching and not batch_size and dims_agree(dims, shape):
        shape = (1, *shape)
    elif not is_batching and batch_size == 1 and not dims_agree(dims, shape):
        shape = shape[1:]
    data = tensor.data if shape == tensor.shape else reshaped(name, tensor.data, shape)
    return Tensor(name, tensor.datatype, shape, data)
