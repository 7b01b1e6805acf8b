"""How far one request of an ensemble has come: the tensors it has, the steps and responses they make possible.

For: EnsembleRun, whose lock guards it. Does not know: threads, how a step is run, who is answered. Invariants: a step
is prepared once for each origin, as soon as all of its inputs of that origin exist; responses come out in order of
origin.
Source: PrepareSteps, InitStep and CheckAndSetEnsembleOutput in Triton's ensemble_scheduler.cc.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from llmbackend.core.errors import TritonError, internal, request_tag
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.tensors import Tensor

from .ensemble_graph import EnsembleGraph, EnsembleStep, ModelKey
from .ensemble_order import OriginOrder
from .ensemble_shapes import ModelShapes, passed_on
from .ensemble_step import StepRequest
from .ensemble_values import EnsembleValues, Origin, SequenceTag, Value, sequence_of

if TYPE_CHECKING:
    from .ensemble_run import EnsembleRun

log = logging.getLogger(__name__)

Fresh = tuple[Iterable[str], Origin]
"""Names of tensors that have a new value, and its origin."""


class EnsembleFlow:
    def __init__(self, graph: EnsembleGraph, request: InferRequest, shapes: Mapping[ModelKey, ModelShapes]) -> None:
        self._graph = graph
        self._request = request
        self._shapes = shapes
        self._flow = graph.flow(request.requested_outputs)
        self._values = EnsembleValues(self._flow.uses)
        self._order = OriginOrder()

    def readers_of(self, step: EnsembleStep) -> Iterator[EnsembleStep]:
        for name in step.outputs.values():
            yield from self._flow.readers.get(name, ())

    def all_behind(self, step: EnsembleStep) -> dict[int, EnsembleStep]:
        """The steps that need what `step` makes, the nearest first, by their index."""
        found: dict[int, EnsembleStep] = {}
        nearest = [step]
        while nearest:
            readers = {reader.index: reader for one in nearest for reader in self.readers_of(one)}
            nearest = [reader for index, reader in readers.items() if index not in found]
            found |= readers
        return found

    def take_inputs(self) -> Fresh:
        inputs = dict.fromkeys(self._graph.optional_inputs) | dict(self._request.inputs)
        for name, tensor in inputs.items():
            self._values.add(name, (), tensor, self._request.batch_size, None)
        return inputs.keys(), ()

    def take_outputs(self, step_request: StepRequest, response: InferenceResponse | None) -> Fresh:
        """Raises TritonError when the response is an error."""
        step, origin = step_request.step, step_request.next_origin
        if response is None:
            return (), origin
        if response.error is not None:
            raise TritonError(response.error.message, response.error.code)
        if step_request.response_count and not step_request.is_decoupled:
            raise internal(f"model '{step.model[0]}' sent more than one response, but is not decoupled")
        step_request.response_count += 1
        given = {tensor.name: tensor for tensor in response.outputs}
        sequence = sequence_of(response.parameters, step_request.sequence)
        for output, name in step.outputs.items():
            self._values.add(name, origin, given.get(output), step_request.batch_size, sequence)
        return step.outputs.values(), origin

    def next_steps(self, fresh: Fresh, run: EnsembleRun) -> list[StepRequest]:
        """What can be run with the `fresh` values that could not without them."""
        names, origin = fresh
        readers = {step.index: step for name in names for step in self._flow.readers.get(name, ())}
        ready = [step for _, step in sorted(readers.items()) if self._values.have(step.inputs.values(), origin)]
        step_requests = [self._prepare(step, origin, run) for step in ready]
        for step_request in step_requests:
            self._order.begin(step_request)
        return step_requests

    def _prepare(self, step: EnsembleStep, origin: Origin, run: EnsembleRun) -> StepRequest:
        shapes = self._shapes[step.model]
        values = self._values.take(step.inputs.values(), origin)
        inputs = []
        for name, tensor_name in step.inputs.items():
            value = values[tensor_name]
            if value.tensor is not None:
                dims = shapes.input_dims.get(name, ())
                inputs.append(passed_on(value.tensor, name, value.batch_size, dims, shapes.is_batching))
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

    def responses(self, fresh: Fresh, before: Origin | None) -> Iterator[tuple[list[Tensor], SequenceTag | None, bool]]:
        """The responses that may leave now, of origins before `before`: outputs, sequence, and whether another one
        waits behind it."""
        names, origin = fresh
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
                outputs.append(passed_on(value.tensor, name, value.batch_size, dims, is_batching))
                sequence = value.sequence or sequence
        return outputs, sequence

    def may_come_before(self, origin: Origin) -> bool:
        """Whether a step that runs can still make something of an earlier origin."""
        return self._order.may_come_before(origin)

    def close(self) -> None:
        self._order.clear()
