"""The state of one ensemble request: its tensors, and the steps and responses that they enable.

All of it is guarded by EnsembleRun's lock. Invariants: a step's request is created once per origin, as soon as all its
inputs of that origin exist; responses are sent in order of origin. Source: TensorData, PrepareSteps, InitStep,
CheckAndSetEnsembleOutput in Triton's ensemble_scheduler.cc.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ...backend_api import ParameterValue, RequestFlag
from ...errors import internal, invalid_argument, request_tag
from ...messages import InferenceResponse
from ...requests.queued_request import QueuedRequest
from ...tensors import Tensor
from .graph import (
    EnsembleGraph,
    EnsembleStep,
    ModelKey,
    ModelShapes,
    Origin,
    SequenceTag,
    StepOwner,
    StepRequest,
    as_step_input,
)

log = logging.getLogger(__name__)

_IDS: Final = 1 << 64
"""The number of numeric sequence ids."""
NewValues = tuple[Iterable[str], Origin]
"""Names of tensors with a new value, and its origin."""


@dataclass(slots=True)
class Value:
    """One tensor of the ensemble.

    tensor: None = an optional input that was not given, or an output that the model omitted
    batch_size: that of the request that produced it; 0 = not batched
    sequence: None = produced by the client
    uses_left: how many times it will still be taken
    """

    tensor: Tensor | None
    batch_size: int
    sequence: SequenceTag | None
    uses_left: int


class EnsembleValues:
    """The ensemble tensors that a step or the response still has to take."""

    def __init__(self, uses: Mapping[str, int]) -> None:
        self._uses = uses
        self._values: dict[tuple[str, Origin], Value] = {}

    def add(
        self, name: str, origin: Origin, tensor: Tensor | None, batch_size: int, sequence: SequenceTag | None
    ) -> None:
        uses = self._uses.get(name, 0)
        if uses:
            self._values[name, origin] = Value(tensor, batch_size, sequence, uses)

    def have(self, names: Iterable[str], origin: Origin) -> bool:
        return all((name, origin) in self._values for name in names)

    def take(self, names: Iterable[str], origin: Origin) -> dict[str, Value]:
        """The values of that origin. Each loses one use."""
        taken = {name: self._values[name, origin] for name in names}
        for name, value in taken.items():
            value.uses_left -= 1
            if not value.uses_left:
                del self._values[name, origin]
        return taken


class OriginOrder:
    """Puts responses in order when the last steps finish in a different order than they started."""

    def __init__(self) -> None:
        self._complete: list[tuple[Origin, int, Mapping[str, Value]]] = []
        self._running: list[tuple[Origin, int, StepRequest]] = []
        """Sorted by the last known next origin, which only increases."""
        self._ticks = itertools.count()

    def __len__(self) -> int:
        """Responses not yet sent."""
        return len(self._complete)

    def clear(self) -> None:
        self._running.clear()

    def begin(self, step: StepRequest) -> None:
        heapq.heappush(self._running, (step.next_origin, next(self._ticks), step))

    def add(self, origin: Origin, outputs: Mapping[str, Value]) -> None:
        heapq.heappush(self._complete, (origin, next(self._ticks), outputs))

    def pop(self, before: Origin | None = None) -> Mapping[str, Value] | None:
        """The next response, if it can be sent and its origin is earlier than `before`."""
        if not self._complete:
            return None
        origin = self._complete[0][0]
        if (before is not None and origin >= before) or self.may_come_before(origin):
            return None
        return heapq.heappop(self._complete)[2]

    def may_come_before(self, origin: Origin) -> bool:
        """Whether a running step can still produce values of an earlier origin."""
        earliest = self._earliest_next_origin()
        return earliest is not None and earliest < origin

    def _earliest_next_origin(self) -> Origin | None:
        while self._running:
            origin, tick, step = self._running[0]
            if step.is_over:
                heapq.heappop(self._running)
            elif step.next_origin != origin:
                heapq.heapreplace(self._running, (step.next_origin, tick, step))
            else:
                return origin
        return None


class EnsembleFlow:
    """The values, step requests and responses of one ensemble request.

    A response is sent once no running step can produce an earlier one. Deliberate difference: Triton numbers the values
    of a tensor in order of arrival, which mixes up branches of unequal speed after a decoupled step; here values that
    stem from the same responses belong together.
    """

    def __init__(self, graph: EnsembleGraph, request: QueuedRequest, shapes: Mapping[ModelKey, ModelShapes]) -> None:
        self._graph = graph
        self._request = request
        self._shapes = shapes
        self._flow = graph.flow(request.requested_outputs)
        self._values = EnsembleValues(self._flow.uses)
        self._order = OriginOrder()

    def readers_of(self, step: EnsembleStep) -> Iterator[EnsembleStep]:
        for name in step.outputs.values():
            yield from self._flow.readers.get(name, ())

    def downstream(self, step: EnsembleStep) -> dict[int, EnsembleStep]:
        """The steps downstream of `step`, nearest first, by index."""
        found: dict[int, EnsembleStep] = {}
        nearest = [step]
        while nearest:
            readers = {reader.index: reader for one in nearest for reader in self.readers_of(one)}
            nearest = [reader for index, reader in readers.items() if index not in found]
            found |= readers
        return found

    def take_inputs(self) -> NewValues:
        inputs = dict.fromkeys(self._graph.optional_inputs) | dict(self._request.inputs)
        for name, tensor in inputs.items():
            self._values.add(name, (), tensor, self._request.batch_size, None)
        return inputs.keys(), ()

    def take_outputs(self, step_request: StepRequest, response: InferenceResponse | None) -> NewValues:
        """Raises TritonError when the response is an error."""
        step, origin = step_request.step, step_request.next_origin
        if response is None:
            return (), origin
        if response.error is not None:
            raise response.error.copy()
        if step_request.response_count and not step_request.is_decoupled:
            raise internal(f"model '{step.model[0]}' sent more than one response, but is not decoupled")
        step_request.response_count += 1
        given = {tensor.name: tensor for tensor in response.outputs}
        sequence = sequence_of(response.parameters, step_request.sequence)
        for output, name in step.outputs.items():
            self._values.add(name, origin, given.get(output), step_request.batch_size, sequence)
        return step.outputs.values(), origin

    def next_steps(self, new_values: NewValues, run: StepOwner) -> list[StepRequest]:
        """The steps that `new_values` make runnable."""
        names, origin = new_values
        readers = {step.index: step for name in names for step in self._flow.readers.get(name, ())}
        ready = [step for _, step in sorted(readers.items()) if self._values.have(step.inputs.values(), origin)]
        step_requests = [self._prepare(step, origin, run) for step in ready]
        for step_request in step_requests:
            self._order.begin(step_request)
        return step_requests

    def _prepare(self, step: EnsembleStep, origin: Origin, run: StepOwner) -> StepRequest:
        shapes = self._shapes[step.model]
        values = self._values.take(step.inputs.values(), origin)
        inputs = []
        for name, tensor_name in step.inputs.items():
            value = values[tensor_name]
            if value.tensor is not None:
                dims = shapes.input_dims.get(name, ())
                inputs.append(as_step_input(value.tensor, name, value.batch_size, dims, shapes.is_batching))
        batch_size = inputs[0].shape[0] if shapes.is_batching and inputs and inputs[0].shape else 0
        sequence = self._sequence_for(step, values.values())
        return StepRequest(run, step, shapes.is_decoupled, origin, tuple(inputs), batch_size, sequence)

    def _sequence_for(self, step: EnsembleStep, values: Iterable[Value]) -> SequenceTag:
        carried = [value.sequence for value in values if value.sequence is not None]
        if not carried:
            return self._request.correlation_id, self._request.flags
        if any(other != carried[0] for other in carried):
            log.error(
                "%sDifferent set of response parameters are set for '%s'. Parameter correlation ID %s, flags %d is "
                "used.",
                request_tag(self._request.id),
                step.model[0],
                *carried[0],
            )
        return carried[0]

    def responses(
        self, new_values: NewValues, before: Origin | None
    ) -> Iterator[tuple[list[Tensor], SequenceTag | None, bool]]:
        """The responses that can be sent now, with origins before `before`: outputs, sequence, whether more are
        waiting."""
        names, origin = new_values
        requested = self._request.requested_outputs
        if any(name in requested for name in names) and self._values.have(requested, origin):
            self._order.add(origin, self._values.take(requested, origin))
        while (values := self._order.pop(before)) is not None:
            yield *self._outputs(values), len(self._order) > 0

    def _outputs(self, values: Mapping[str, Value]) -> tuple[list[Tensor], SequenceTag | None]:
        is_batching = self._request.batch_size != 0
        outputs, sequence = [], None
        for name, value in values.items():
            if value.tensor is not None:
                dims = self._graph.output_dims[name]
                outputs.append(as_step_input(value.tensor, name, value.batch_size, dims, is_batching))
                sequence = value.sequence or sequence
        return outputs, sequence

    def may_come_before(self, origin: Origin) -> bool:
        return self._order.may_come_before(origin)

    def close(self) -> None:
        """Breaks the reference cycle run → flow → order → step → run."""
        self._order.clear()


def sequence_of(parameters: Mapping[str, ParameterValue], sent: SequenceTag) -> SequenceTag:
    """The sequence in a response's parameters, else the one with which its request was sent. Raises TritonError
    INVALID_ARG for a parameter of the wrong type."""
    names = ("sequence_id", "sequence_start", "sequence_end")
    given = {name: parameters[name] for name in names if name in parameters}
    if not given:
        return sent
    correlation_id = given.pop("sequence_id", sent[0])
    if isinstance(correlation_id, bool) or not isinstance(correlation_id, (int, str)):
        raise invalid_argument(
            "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"
        )
    if isinstance(correlation_id, int):
        correlation_id %= _IDS
    flags = RequestFlag(0)
    for name, flag in (("sequence_start", RequestFlag.SEQUENCE_START), ("sequence_end", RequestFlag.SEQUENCE_END)):
        value = given.get(name, False)
        if not isinstance(value, bool):
            raise invalid_argument(f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL")
        flags |= flag if value else RequestFlag(0)
    return correlation_id, flags


def as_parameter(correlation_id: int | str) -> int | str:
    """The id as a response parameter. These have 64 bits with a sign, so that ids from 2**63 on become negative."""
    if isinstance(correlation_id, str) or correlation_id < _IDS // 2:
        return correlation_id
    return correlation_id - _IDS
