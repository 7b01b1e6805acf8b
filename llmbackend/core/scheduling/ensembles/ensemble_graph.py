"""The data flow of an ensemble, read once from its configuration: which step reads and writes which tensor.

For: the ensemble scheduler and its runs. Does not know: requests, models that serve. Invariant: a flow holds exactly
the steps that the requested outputs need, whichever they are.
Source: EnsembleInfo and the pruning of Triton's ensemble_scheduler.cc; unlike there, an output that was not asked for
but is read by a step that is needed keeps the step that writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

ModelKey = tuple[str, int]
"""Name and version of a composing model; version -1 = the highest READY one."""


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """`inputs` and `outputs` map the names that the model knows to names of the ensemble's tensors."""

    index: int
    model: ModelKey
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Flow:
    """What has to be run for some outputs: the steps that read each tensor, and how often each value of it is taken (by
    steps, and by the response)."""

    readers: Mapping[str, tuple[EnsembleStep, ...]]
    uses: Mapping[str, int]


class EnsembleGraph:
    def __init__(self, config: ModelConfig) -> None:
        scheduling = config.ensemble_scheduling
        self.name = config.name
        self.is_decoupled = config.model_transaction_policy.decoupled
        self.most_inflight = scheduling.max_inflight_requests
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
