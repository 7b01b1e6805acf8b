"""One model instance and its stub process: initialize, execute, restart, finalize.

Invariants: every request of an Execute call is released exactly once and gets exactly one FINAL, however the model or
its process fails; the model's errors are answered here rather than raised to the host, so that no request is counted
twice.
Source: Triton's python backend; statistics as in golden transcript 09 (error responses count as success, raises as
failure).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from llmbackend.core.backend_api import ModelInstance, ReleaseFlag, Request, TritonError

from .model_state import ModelState, config_text
from .requests import Responder, state_outputs
from .stub.pb_response import PackedResponse
from .stub_process import StubDeadError
from .stub_services import StubServices
from .stub_supervisor import StubSupervisor
from .wire_messages import execute_error, pack_request, unpack_response

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outcome:
    """The result of an execute call.

    error                its text, if execute raised
    responses            one per request; None = the stub reports the request's end itself
    rescheduled          the ids of the requests to reschedule
    start_ns, end_ns     of the model's execute, monotonic
    parts                the data of large tensors in `responses`
    """

    error: str | None
    responses: Sequence[PackedResponse | None]
    rescheduled: Sequence[int]
    start_ns: int
    end_ns: int
    parts: Sequence[Any] = ()


class ModelInstanceState:
    """Execute is called on the instance's own thread, one call at a time."""

    def __init__(self, instance: ModelInstance, model_state: ModelState) -> None:
        self._instance = instance
        self._model_state = model_state
        config = instance.model.config
        self._batches = config.max_batch_size > 0
        self._has_sequences = config.HasField("sequence_batching")
        self._settings = (
            _arguments(instance, config_text(config)),
            config.model_transaction_policy.decoupled,
            state_outputs(config),
        )
        launch = partial(model_state.launch, instance.name, instance.host_policy)
        self.supervisor = StubSupervisor(instance.name, launch, self._prepare, model_state.stub_timeout_s)

    def initialize(self) -> None:
        """Raises TritonError INTERNAL with the model's exception."""
        self.supervisor.start(self._model_state.spare.take(self._instance.host_policy))

    def finalize(self) -> None:
        """The model's own finalize may wait for requests in flight; afterwards its process ends."""
        self.supervisor.close(self._model_state.stub_timeout_s)

    def process_requests(self, requests: Sequence[Request]) -> None:
        """While no process can take the requests, raises TritonError, so that the host keeps them."""
        exec_start_ns = time.monotonic_ns()
        stub = self.supervisor.get(requests)
        numbers = [stub.open(request) for request in requests]
        outcome = self._run(stub, requests, numbers)
        # Before the responses: a client that has its response finds it in the statistics.
        self._account(requests, outcome, exec_start_ns)
        if self._has_sequences:  # the next request runs after the release, so its state must be set before
            self._answer_all(stub, numbers, outcome)
            _give_back(stub, requests, numbers, outcome.rescheduled)
        else:  # sending wakes other threads, so the remaining work is done first
            _give_back(stub, requests, numbers, outcome.rescheduled)
            self._answer_all(stub, numbers, outcome)

    def _prepare(self, stub: StubServices) -> None:
        self._model_state.load(stub)
        stub.tells_readiness, _ = self._model_state.call(stub, "initialize", self._settings)

    def _run(self, stub: StubServices, requests: Sequence[Request], numbers: Sequence[int]) -> _Outcome:
        start_ns = time.monotonic_ns()
        parts: list[Any] = []
        try:
            packed = [pack_request(request, number, parts) for request, number in zip(requests, numbers, strict=True)]
            answer, answer_parts = stub.process.call("execute", packed, parts)
            error, responses, rescheduled, model_start_ns, model_end_ns = answer
            return _Outcome(error, responses, rescheduled, model_start_ns, model_end_ns, answer_parts)
        except StubDeadError as error:  # the requests have been answered
            text = str(error)
        except Exception as error:
            log.exception("instance '%s' could not execute", self._instance.name)
            text = f"{type(error).__name__}: {error}"
        return _Outcome(text, (), (), start_ns, time.monotonic_ns())

    def _answer_all(self, stub: StubServices, numbers: Sequence[int], outcome: _Outcome) -> None:
        if outcome.error is not None:
            self._fail(stub, numbers, outcome.error)
        for number, response in zip(numbers, outcome.responses, strict=False):
            if response is not None:
                self._answer(stub, number, response, outcome.parts)

    def _fail(self, stub: StubServices, numbers: Sequence[int], text: str) -> None:
        for number in numbers:
            if (responder := stub.take(number)) is not None:
                responder.fail(execute_error(self._instance.name, text))

    def _answer(self, stub: StubServices, number: int, packed: PackedResponse, parts: Sequence[Any]) -> None:
        """Sends the response. If it is malformed, only its request fails."""
        responder = stub.take(number)
        if responder is None:
            return
        try:
            outputs, parameters, error = unpack_response(packed, parts)
        except (KeyError, TypeError, ValueError, IndexError) as problem:
            responder.fail(execute_error(self._instance.name, f"{type(problem).__name__}: {problem}"))
        else:
            responder.send(outputs, parameters, error, is_last=True)

    def _account(self, requests: Sequence[Request], outcome: _Outcome, exec_start_ns: int) -> None:
        times_ns = (exec_start_ns, outcome.start_ns, outcome.end_ns, time.monotonic_ns())
        success = outcome.error is None
        batch_size = 0
        for request in requests:
            batch_size += self._batch_size(request)
            self._instance.report_statistics(request, success, *times_ns)
        self._instance.report_batch_statistics(batch_size, *times_ns)

    def _batch_size(self, request: Request) -> int:
        """1 if the model does not batch."""
        if not self._batches:
            return 1
        first = next(iter(request.inputs.values()), None)
        return first.shape[0] if first is not None and first.shape else 1


def _give_back(
    stub: StubServices, requests: Sequence[Request], numbers: Sequence[int], rescheduled: Sequence[int]
) -> None:
    for request, number in zip(requests, numbers, strict=True):
        if number in rescheduled:
            _reschedule(request, stub.take(number))
        else:
            request.release()


def _reschedule(request: Request, responder: Responder | None) -> None:
    """Returns the request to its batcher; ends it if that fails or the client already has its last response."""
    if responder is None:
        request.release()
        return
    try:
        request.release(ReleaseFlag.RESCHEDULE)
    except TritonError as error:
        responder.fail(error)
        request.release()
    else:
        responder.abandon()


def _arguments(instance: ModelInstance, config_json: str) -> dict[str, str]:
    """The `args` for a model's `initialize`."""
    return {
        "model_config": config_json,
        "model_instance_kind": instance.kind.value.removeprefix("KIND_"),
        "model_instance_name": instance.name,
        "model_instance_device_id": str(instance.device_id),
        "model_repository": str(instance.model.directory),
        "model_version": str(instance.model.version),
        "model_name": instance.model.name,
    }
