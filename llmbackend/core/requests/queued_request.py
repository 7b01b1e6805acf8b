"""A request from validation to release, and the responses and response factories that a backend creates for it.

Invariants: a request is released exactly once and a response sent at most once; each of these objects is a handle on
its ResponseChannel, dropped by release, send or close, or by the reaper if a backend loses the object.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from ..backend_api import ParameterValue, ReleaseFlag, RequestFlag, ResponseFlag, State, Tensor
from ..errors import TritonError, invalid_argument, request_tag
from ..messages import InferenceRequest, InferenceResponse
from ..metrics.model_metrics import FailureReason
from ..tracing.trace import RequestTrace
from .request_validation import ValidRequest
from .response_channel import ResponseChannel

log = logging.getLogger(__name__)

NOT_RESCHEDULABLE = (
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
    "such a flag."
)


class SequenceTurn(Protocol):
    """A request's turn in its sequence, once it has left the queue. Has no reference to the request."""

    def done(self) -> None:
        """Called when the request is released without RESCHEDULE."""

    def reschedule(self, request: QueuedRequest) -> None:
        """Takes the request back. Raises TritonError INVALID_ARG; the request then stays with the backend."""


class States(Protocol):
    """The implicit states of a sequence."""

    def new_state(self, tensor: Tensor) -> State: ...


class QueuedRequest:
    """A validated request: backend_api.Request.

    batch_size: 0 = its model does not batch
    queue_start_ns: when it was queued (monotonic); set by the scheduler
    batcher_start_ns: when the batcher received it (monotonic); set by the scheduler
    turn, states: set by the sequence batcher
    batch_key: set by the dynamic batcher; equal for requests that may share a batch
    order_entry: set by ResponseOrder
    """

    collects_statistics = True

    def __init__(self, request: InferenceRequest, valid: ValidRequest, channel: ResponseChannel) -> None:
        self.channel = channel
        self.id = request.id
        self.correlation_id = request.correlation_id
        self.flags: RequestFlag = request.flags
        self.priority = request.priority
        self.timeout_us = request.timeout_us
        self.parameters: Mapping[str, ParameterValue] = request.parameters
        self.tenant = request.tenant
        self.resume = request.resume
        self.command = request.command
        self.requested_outputs = valid.requested_outputs
        self.batch_size = valid.batch_size
        self.queue_start_ns = 0
        self.batcher_start_ns = 0
        self.turn: SequenceTurn | None = None
        self.states: States | None = None
        self.batch_key: object = None
        self.order_entry: object = None
        self._own_inputs = valid.inputs
        self._inputs: Mapping[str, Tensor] | None = valid.inputs
        channel.retain()
        if channel.trace is not None:
            channel.trace.record_inputs(valid.inputs.values())

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Raises TritonError INVALID_ARG after release."""
        if self._inputs is None:
            raise invalid_argument(f"{request_tag(self.id)}inputs must not be used after the request was released")
        return self._inputs

    @property
    def number(self) -> int:
        return self.channel.number

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

    def new_response(self) -> BackendResponse:
        self._check_owned("make a response")
        return BackendResponse(self.channel)

    def response_factory(self) -> BackendResponseFactory:
        self._check_owned("make a response factory")
        return BackendResponseFactory(self.channel)

    def new_state(self, tensor: Tensor) -> State:
        self._check_owned("make a state")
        if self.states is None:
            raise invalid_argument(
                f"unable to add state '{tensor.name}'. State configuration is missing for model "
                f"'{self.channel.owner.name}'."
            )
        return self.states.new_state(tensor)

    def release(self, flags: ReleaseFlag = ReleaseFlag.ALL) -> None:
        self._check_owned("release it again")
        if flags is not ReleaseFlag.ALL and flags & ReleaseFlag.RESCHEDULE:
            if self.turn is None:
                raise invalid_argument(NOT_RESCHEDULABLE)
            self.turn.reschedule(self)
            return
        self._inputs = None
        if self.channel.trace is not None:
            self.channel.trace.queued(self.queue_start_ns)
        self._own_inputs = {}
        if self.turn is not None:
            self.turn.done()  # before the last handle is dropped, which may make the model idle
        self.channel.drop()

    def add_inputs(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds control inputs and states, replacing inputs of the same name."""
        self._inputs = {**self._own_inputs, **tensors}

    def reset_for_reschedule(self) -> None:
        """Resets the request, without sequence flags and callbacks, and counts what has been reported so far."""
        self.flags = RequestFlag(0)
        self.turn = None
        self.states = None
        self._inputs = self._own_inputs
        self.channel.clear_on_cancel()
        self.channel.count_now()

    def fail(self, error: TritonError, reason: FailureReason) -> None:
        """Ends a request owned by the host: sends an error response with FINAL, counts the request and releases it."""
        self.channel.count_when_final(partial(self._count_failure, reason))
        self.channel.fail(error)
        if not self.is_released:
            self.release()

    def _count_failure(self, reason: FailureReason, final_ns: int) -> None:
        self.channel.owner.statistics.record_failure(final_ns - self.channel.start_ns, reason)

    def _check_owned(self, action: str) -> None:
        if self._inputs is None:
            raise invalid_argument(f"{request_tag(self.id)}the request was released, cannot {action}")

    def __del__(self) -> None:
        if getattr(self, "_inputs", None) is not None:
            self.channel.owner.reaper.submit(partial(_complete_lost, self.channel, "request", "releasing", self.turn))


class BackendResponse:
    """backend_api.Response. It may be dropped unsent."""

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

    def send(
        self, flags: ResponseFlag = ResponseFlag.NONE, error: TritonError | None = None, delta: bytes = b""
    ) -> None:
        """After FINAL, the response is logged and dropped. Raises TritonError INVALID_ARG if it was sent before."""
        self._check_unsent()
        self._sent = True
        channel = self._channel
        owner, request_id = channel.owner, channel.request_id
        outputs = () if error is not None else tuple(self._outputs)
        error = None if error is None else error.copy()
        try:
            channel.send(
                InferenceResponse(owner.name, owner.version, request_id, outputs, self._parameters, error, delta), flags
            )
        finally:
            channel.drop()

    def _check_unsent(self) -> None:
        if self._sent:
            raise invalid_argument(f"{request_tag(self._channel.request_id)}the response was already sent")

    def __del__(self) -> None:
        if not getattr(self, "_sent", True):
            self._channel.owner.reaper.submit(self._channel.drop)


class BackendResponseFactory:
    """backend_api.ResponseFactory."""

    __slots__ = ("_closed", "channel")

    def __init__(self, channel: ResponseChannel) -> None:
        self.channel = channel
        self._closed = False
        channel.retain()

    @property
    def is_cancelled(self) -> bool:
        return self.channel.is_cancelled

    def new_response(self) -> BackendResponse:
        self._check_open()
        return BackendResponse(self.channel)

    def send(self, outputs: Sequence[Tensor], flags: ResponseFlag = ResponseFlag.NONE, delta: bytes = b"") -> None:
        """After FINAL, the response is logged and dropped. Raises TritonError INVALID_ARG after `close`."""
        if self._closed:
            self._check_open()
        channel = self.channel
        owner = channel.owner
        response = InferenceResponse(owner.name, owner.version, channel.request_id, outputs, delta=delta)
        if channel.observer is None:
            channel.deliver(response, flags)
        else:
            channel.send(response, flags)

    def send_flags(self, flags: ResponseFlag) -> None:
        """Raises TritonError INVALID_ARG after `close`."""
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
            self.channel.owner.reaper.submit(partial(_complete_lost, self.channel, "response factory", "closing"))


def _complete_lost(channel: ResponseChannel, what: str, duty: str, turn: SequenceTurn | None = None) -> None:
    """Drops the handle of an object that a backend has lost. duty: what the backend should have done."""
    log.error(
        "%sthe backend of model '%s' dropped its %s without %s it",
        request_tag(channel.request_id),
        channel.owner.name,
        what,
        duty,
    )
    if turn is not None:
        turn.done()
    channel.drop()
