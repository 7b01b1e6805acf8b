"""The concrete Request, Response and ResponseFactory that backends see.

For: schedulers (they queue an InferRequest) and backends (through the protocols of backend_api). Does not know: where
requests come from, what a model does. Invariants: a request is released exactly once, a response sent at most once;
each object is one handle on its ResponseChannel, given back by release, send and close, or, when a backend loses it,
by the reaper.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from llmbackend.core.backend_api import ParameterValue, ReleaseFlag, RequestFlag, ResponseFlag, State, Tensor
from llmbackend.core.errors import TritonError, invalid_argument, request_tag
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.statistics import FailureReason
from llmbackend.core.tracing.trace import RequestTrace

from .response_channel import ResponseChannel

log = logging.getLogger(__name__)

NOT_RESCHEDULABLE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag."
)


class SequenceStep(Protocol):
    """What a request is to its sequence, once it has left the queue. It holds no reference to the request."""

    def done(self) -> None:
        """The request was released for good."""

    def reschedule(self, request: InferRequest) -> None:
        """Takes the request back. Raises TritonError INVALID_ARG, and leaves it with the backend."""


class States(Protocol):
    """The implicit states of a sequence."""

    def new_state(self, tensor: Tensor) -> State: ...


class InferRequest:
    """A validated request. The host owns it until Execute returns; then the backend does, until it releases it.

    `batch_size` is 0 for a model that does not batch. Times are time.monotonic_ns(), set by the scheduler: when the
    request was queued, and when the batcher got it that forms its batch. `step` and `states` are set by the sequence
    batcher.
    """

    collects_statistics = True

    def __init__(
        self,
        message: InferenceRequest,
        channel: ResponseChannel,
        inputs: Mapping[str, Tensor],
        requested_outputs: tuple[str, ...],
        batch_size: int,
    ) -> None:
        self.channel = channel
        self.batch_size = batch_size
        self.queue_start_ns = 0
        self.batcher_start_ns = 0
        self.step: SequenceStep | None = None
        self.states: States | None = None
        self.batch_key: object = None  # the dynamic batcher's: equal for requests that may share a batch
        self.place: object = None  # the response order's: where its responses stand in line
        self.id = message.id
        self.correlation_id = message.correlation_id
        self.flags: RequestFlag = message.flags
        self.priority = message.priority
        self.timeout_us = message.timeout_us
        self.parameters: Mapping[str, ParameterValue] = message.parameters
        self.tenant = message.tenant
        self.requested_outputs = requested_outputs
        self._own_inputs = inputs
        self._inputs: Mapping[str, Tensor] | None = inputs
        channel.retain()
        if channel.trace is not None:
            channel.trace.inputs(inputs.values())

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """The input tensors by name. Raises TritonError INVALID_ARG after release."""
        if self._inputs is None:
            raise invalid_argument(f"{request_tag(self.id)}inputs must not be used after the request was released")
        return self._inputs

    @property
    def trace(self) -> RequestTrace | None:
        return self.channel.trace

    @property
    def is_released(self) -> bool:
        return self._inputs is None

    @property
    def is_cancelled(self) -> bool:
        return self.channel.is_cancelled

    def on_cancel(self, callback: Callable[[], None]) -> None:
        self.channel.on_cancel(callback)

    def new_response(self) -> InferResponse:
        self._check_owned("make a response")
        return InferResponse(self.channel)

    def response_factory(self) -> InferResponseFactory:
        self._check_owned("make a response factory")
        return InferResponseFactory(self.channel)

    def new_state(self, tensor: Tensor) -> State:
        """Raises TritonError INVALID_ARG for a model without implicit states, or a name that is none of them."""
        self._check_owned("make a state")
        if self.states is None:
            raise invalid_argument(
                f"unable to add state '{tensor.name}'. State configuration is missing for model "
                f"'{self.channel.owner.name}'."
            )
        return self.states.new_state(tensor)

    def release(self, flags: ReleaseFlag = ReleaseFlag.ALL) -> None:
        """Gives the request back; with RESCHEDULE, to get it again. Raises TritonError INVALID_ARG when released
        before, or for RESCHEDULE of a request that is no iterative sequence."""
        self._check_owned("release it again")
        if flags is not ReleaseFlag.ALL and flags & ReleaseFlag.RESCHEDULE:
            if self.step is None:
                raise invalid_argument(NOT_RESCHEDULABLE)
            self.step.reschedule(self)
            return
        self._inputs = None
        if self.channel.trace is not None:
            self.channel.trace.queued(self.queue_start_ns)
        self._own_inputs = {}
        if self.step is not None:
            self.step.done()  # before the last handle goes: the model may be idle then
        self.channel.drop()

    def give_inputs(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds what the host tells the model: control inputs and states, in place of inputs of the same names."""
        self._inputs = {**self._own_inputs, **tensors}

    def take_back(self) -> None:
        """The backend wants it again: as it came, but it starts and ends no sequence. What was reported so far is
        counted."""
        self.flags = RequestFlag(0)
        self.step = None
        self.states = None
        self._inputs = self._own_inputs
        self.channel.count_now()

    def fail(self, error: TritonError, reason: FailureReason) -> None:
        """The host's way to end a request that it owns: an error response with FINAL, counted, then release."""
        self.channel.when_final(partial(self._count_failure, reason))
        self.channel.fail(error)
        if not self.is_released:
            self.release()

    def _count_failure(self, reason: FailureReason, final_ns: int) -> None:
        self.channel.owner.statistics.record_failure(final_ns - self.channel.start_ns, reason)

    def _check_owned(self, action: str) -> None:
        if self._inputs is None:
            raise invalid_argument(f"{request_tag(self.id)}the request was released, can not {action}")

    def __del__(self) -> None:
        if getattr(self, "_inputs", None) is not None:
            self.channel.owner.reaper.submit(partial(_abandoned, self.channel, "request", "releasing", self.step))


class InferResponse:
    """One response under construction. `send` ends its life, also when sending fails; dropping it unsent is allowed."""

    def __init__(self, channel: ResponseChannel) -> None:
        self._channel = channel
        self._outputs: list[Tensor] = []
        self._parameters: dict[str, ParameterValue] = {}
        self._sent = False
        channel.retain()

    def add_output(self, tensor: Tensor) -> None:
        self._check_unsent()
        self._outputs.append(tensor)

    def set_parameter(self, name: str, value: ParameterValue) -> None:
        self._check_unsent()
        self._parameters[name] = value

    def send(self, flags: ResponseFlag = ResponseFlag.NONE, error: TritonError | None = None) -> None:
        """Hands the response to the client; after FINAL it is logged and dropped. INVALID_ARG when sent before."""
        self._check_unsent()
        self._sent = True
        owner = self._channel.owner
        response = InferenceResponse(
            model_name=owner.name,
            model_version=owner.version,
            request_id=self._channel.request_id,
            outputs=() if error is not None else tuple(self._outputs),
            parameters=self._parameters,
            # A fresh error: the traceback of the backend's holds frames, and they hold requests.
            error=None if error is None else TritonError(error.message, error.code),
        )
        try:
            if self._channel.observer is not None and owner.may_block_in_send:
                self._channel.observer.make_room()
            self._channel.deliver(response, flags)
        finally:
            self._channel.drop()

    def _check_unsent(self) -> None:
        if self._sent:
            raise invalid_argument(f"{request_tag(self._channel.request_id)}the response was already sent")

    def __del__(self) -> None:
        if not getattr(self, "_sent", True):
            self._channel.owner.reaper.submit(self._channel.drop)


class InferResponseFactory:
    """Makes the responses of one request after its release. An open factory keeps its model from unloading."""

    def __init__(self, channel: ResponseChannel) -> None:
        self.channel = channel
        self._closed = False
        channel.retain()

    @property
    def is_cancelled(self) -> bool:
        return self.channel.is_cancelled

    def new_response(self) -> InferResponse:
        self._check_open()
        return InferResponse(self.channel)

    def send_flags(self, flags: ResponseFlag) -> None:
        """Completes without one more response; after FINAL it is logged and dropped. INVALID_ARG after `close`."""
        self._check_open()
        self.channel.deliver(None, flags)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.channel.drop()

    def _check_open(self) -> None:
        if self._closed:
            raise invalid_argument(f"{request_tag(self.channel.request_id)}the response factory was closed")

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.channel.owner.reaper.submit(partial(_abandoned, self.channel, "response factory", "closing"))


def _abandoned(channel: ResponseChannel, what: str, duty: str, step: SequenceStep | None = None) -> None:
    log.error(
        "%sthe backend of model '%s' lost its %s without %s it",
        request_tag(channel.request_id),
        channel.owner.name,
        what,
        duty,
    )
    if step is not None:
        step.done()
    channel.drop()
