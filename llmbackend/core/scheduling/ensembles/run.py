"""The scheduler of ensembles, and one ensemble request from its inputs to its last response.

Invariants: the request has exactly one final response; it is counted and released when the last of its step requests
has ended. Source: EnsembleContext in Triton's ensemble_scheduler.cc.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

from tritonclient.grpc.model_config_pb2 import ModelConfig

from ...backend_api import RequestFlag, ResponseFlag
from ...errors import TritonError, cancelled, internal, invalid_argument, request_tag, unavailable
from ...messages import InferenceHandle, InferenceRequest, InferenceResponse, held_bytes
from ...metrics.model_metrics import FailureReason, PhaseTimes
from ...model_to_model import ModelHandle, ModelHost
from ...requests.queued_request import QueuedRequest
from ...tensors import Tensor
from ..scheduler import BatchSource
from .flow import EnsembleFlow, NewValues, as_parameter
from .graph import EnsembleGraph, ModelKey, ModelShapes, Origin, SequenceTag, StepLauncher, StepLimit, StepRequest

log = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 4 << 20
"""Limit on the inputs of one request that wait for a slot of one step; as for responses that wait for a client."""
TakeValues = Callable[[], NewValues]
"""Adds new values to the flow, or raises the TritonError received in their place."""


class EnsembleRun:
    """One request of an ensemble. Has a handle on each composing model, so that none is finalised while it runs.

    A failure or a cancellation stops the steps whose results are no longer wanted, including those already started
    (unlike Triton); responses that precede the failure in the stream are still sent. The bytes waiting for a slot of a
    step are bounded; a response that exceeds the bound fails the request.

    Locks: the response callback of a step runs under locks of that step's model and takes the run's lock, under which
    only the ensemble's own channel is called. Steps are started and cancelled (which calls other models) on the
    ensemble's launcher, while no lock is held.

    limits: one for each step, or none
    on_end: called once, before the ensemble's request is released
    """

    def __init__(
        self,
        graph: EnsembleGraph,
        request: QueuedRequest,
        models: Mapping[ModelKey, ModelHandle],
        shapes: Mapping[ModelKey, ModelShapes],
        limits: Sequence[StepLimit],
        launcher: StepLauncher,
        on_end: Callable[[EnsembleRun], None],
    ) -> None:
        self._graph = graph
        self._request = request
        self._models = models
        self._limits = limits
        self._launcher = launcher
        self._on_end = on_end
        self._start_ns = time.monotonic_ns()
        self._lock = threading.Lock()
        self._flow = EnsembleFlow(graph, request, shapes)
        self._running: set[StepRequest] = set()
        """Step requests whose last response has not arrived."""
        self._waiting_bytes: Counter[int] = Counter()
        """For each step: bytes of inputs that wait for a slot."""
        self._num_open = 0
        """Step requests that have not ended."""
        self._compute_ns = [0, 0, 0]
        self._failure: tuple[Origin, TritonError] | None = None
        self._is_cancelled = False
        self._has_responded = False
        self._is_final = False
        self._is_ended = False

    def wants(self, step_request: StepRequest) -> bool:
        failure = self._failure
        return not self._is_cancelled and (failure is None or step_request.next_origin < failure[0])

    def start(self) -> None:
        self._request.on_cancel(self._cancel)
        self._start_and_stop(*self._proceed(self._flow.take_inputs))
        self._end_if_over()

    # --- what happens to a step (any thread) ------------------------------------------------------------------------

    def send(self, step_request: StepRequest) -> InferenceHandle:
        self._release_waiting_bytes(step_request)
        if not self.wants(step_request):
            raise cancelled("Request cancelled")
        step, request = step_request.step, self._request
        correlation_id, flags = step_request.sequence
        model = self._models[step.model]
        model.enter()  # permitted even during an unload, because the run has a handle on the model
        return model.infer(
            InferenceRequest(
                model_name=step.model[0],
                id=request.id,
                inputs=step_request.inputs,
                requested_outputs=tuple(step.outputs),
                parameters=request.parameters,
                correlation_id=correlation_id,
                flags=flags,
                priority=request.priority,
                timeout_us=request.timeout_us,
                trace=None if request.trace is None else request.trace.child(),
                tenant=request.tenant,
            ),
            step_request,
            observer=step_request,
        )

    def responded(self, step_request: StepRequest, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        is_last = bool(flags & ResponseFlag.FINAL)
        if is_last and self._limits:
            limit = self._limits[step_request.step.index]
            limit.finished()
            self._launcher.submit(limit.start_waiting)
        take: TakeValues = partial(self._flow.take_outputs, step_request, response)
        if response is not None and response.error is None and self._waiting_bytes:
            overflow = self._overflow(step_request)
            take = take if overflow is None else _raising(overflow)
        ready, unwanted = self._proceed(take, step_request, is_last)
        if ready or unwanted:
            self._launcher.submit(partial(self._start_and_stop, ready, unwanted))

    def refused(self, step_request: StepRequest, error: TritonError) -> None:
        if self._limits:
            self._limits[step_request.step.index].finished()
            self._limits[step_request.step.index].start_waiting()
        self._end_unsent(step_request, error)

    def apply_backpressure(self, step_request: StepRequest) -> None:
        """Also delays a decoupled model on behalf of an outer ensemble that has this one as a step."""
        if not step_request.is_decoupled:
            return
        for index in self._flow.downstream(step_request.step) if self._limits else ():
            self._limits[index].wait_for_slot(lambda: not self.wants(step_request))
        outer = self._request.channel.observer
        if outer is not None:
            outer.apply_backpressure()

    def _overflow(self, step_request: StepRequest) -> TritonError | None:
        """The error for a response of that step that exceeds the bound; None = within the bound."""
        for reader in self._flow.readers_of(step_request.step):
            if self._waiting_bytes[reader.index] >= MAX_WAITING_BYTES:
                return unavailable(
                    f"the request was cancelled: model '{step_request.step.model[0]}' responds faster than model "
                    f"'{reader.model[0]}' reads, more than {MAX_WAITING_BYTES} bytes were waiting"
                )
        return None

    def _release_waiting_bytes(self, step_request: StepRequest) -> None:
        if step_request.waiting_bytes:
            with self._lock:
                self._waiting_bytes[step_request.step.index] -= step_request.waiting_bytes
                step_request.waiting_bytes = 0

    def add_times(self, times: PhaseTimes) -> None:
        with self._lock:
            for phase in range(3):
                self._compute_ns[phase] += max(times[phase + 1] - times[phase], 0)

    def step_gone(self) -> None:
        with self._lock:
            self._num_open -= 1
        self._end_if_over()

    def _cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            running = list(self._running)
        self._launcher.submit(partial(self._stop, running))

    # --- the flow ---------------------------------------------------------------------------------------------------

    def _proceed(
        self, take: TakeValues, step_request: StepRequest | None = None, is_over: bool = False
    ) -> tuple[list[StepRequest], list[StepRequest]]:
        """Takes new values and sends the responses that they complete. Returns the steps to start and those to stop.

        step_request: the source of the values; None = the client
        is_over: whether these are its last values
        """
        with self._lock:
            origin = step_request.next_origin if step_request is not None else ()
            if step_request is not None and is_over:
                step_request.is_over = True
                self._running.discard(step_request)
            failure = self._failure
            ready = [] if self._is_final else self._advance(take, origin)
            unwanted = [] if self._failure is failure else [one for one in self._running if not self.wants(one)]
            if self._limits:
                self._count_waiting(ready)
        if self._limits:
            for one in ready:
                self._limits[one.step.index].add(one)
        return ready, unwanted

    def _count_waiting(self, ready: Iterable[StepRequest]) -> None:
        """The caller holds the lock."""
        for step_request in ready:
            if step_request.is_of_stream:
                step_request.waiting_bytes = held_bytes(step_request.inputs)
                self._waiting_bytes[step_request.step.index] += step_request.waiting_bytes

    def _advance(self, take: TakeValues, origin: Origin) -> list[StepRequest]:
        """Returns the steps to start next. Finishes the request if nothing is left. The caller holds the lock."""
        ready: list[StepRequest] = []
        try:
            is_behind_failure = self._failure is not None and origin >= self._failure[0]
            new_values: NewValues = ((), origin) if is_behind_failure else take()
            ready = self._flow.next_steps(new_values, self)
            self._running.update(ready)
            self._num_open += len(ready)
            self._respond(new_values)
        except TritonError as error:
            self._fail(origin, error)
        except Exception as error:
            log.exception("ensemble '%s' failed", self._graph.name)
            self._fail(origin, internal(f"{type(error).__name__}: {error}"))
        if not self._is_final and self._is_settled():
            self._finish()
        return ready

    def _fail(self, origin: Origin, error: TritonError) -> None:
        self._failure = origin, error.copy(f"in ensemble '{self._graph.name}', ")

    def _is_settled(self) -> bool:
        if self._failure is not None:
            return not self._flow.may_come_before(self._failure[0])
        return not self._running

    def _start_and_stop(self, ready: Sequence[StepRequest], unwanted: Sequence[StepRequest]) -> None:
        for step_request in ready:
            if not self._limits:
                step_request.start()
                continue
            self._limits[step_request.step.index].start_waiting()
            if not self.wants(step_request):
                self._stop([step_request])
        if unwanted:
            self._stop(unwanted)

    def _stop(self, step_requests: Iterable[StepRequest]) -> None:
        for limit in self._limits:
            limit.wake()
        for step_request in step_requests:
            if self._limits and self._limits[step_request.step.index].discard(step_request):
                self._release_waiting_bytes(step_request)
                self._end_unsent(step_request, cancelled("Request cancelled"))
            else:
                step_request.cancel()

    def _end_unsent(self, step_request: StepRequest, error: TritonError) -> None:
        self._start_and_stop(*self._proceed(_raising(error), step_request, is_over=True))
        self.step_gone()

    # --- responses --------------------------------------------------------------------------------------------------

    def _respond(self, new_values: NewValues) -> None:
        """Sends the responses completed by `new_values`, before any failure is reported. The caller holds the lock."""
        before = None if self._failure is None else self._failure[0]
        for outputs, sequence, has_next in self._flow.responses(new_values, before):
            self._has_responded = True
            self._is_final = not self._running and not has_next and before is None
            self._send(outputs, sequence, ResponseFlag.FINAL if self._is_final else ResponseFlag.NONE)

    def _send(self, outputs: Iterable[Tensor], sequence: SequenceTag | None, flags: ResponseFlag) -> None:
        response = self._request.new_response()
        for tensor in outputs:
            response.add_output(tensor)
        if sequence is not None:
            correlation_id, sequence_flags = sequence
            response.set_parameter("sequence_id", as_parameter(correlation_id))
            response.set_parameter("sequence_start", RequestFlag.SEQUENCE_START in sequence_flags)
            response.set_parameter("sequence_end", RequestFlag.SEQUENCE_END in sequence_flags)
        response.send(flags)

    def _finish(self) -> None:
        """Ends the request for its client. The caller holds the lock."""
        self._is_final = True
        if self._failure is None and not self._has_responded and not self._graph.is_decoupled:
            reason = "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
            self._fail((), invalid_argument(f"{request_tag(self._request.id)}{reason}"))
        if self._failure is not None:
            self._request.channel.fail(self._failure[1])
        else:
            self._request.channel.deliver(None, ResponseFlag.FINAL)

    def _end_if_over(self) -> None:
        with self._lock:
            if not self._is_final or self._num_open or self._is_ended:
                return
            self._is_ended = True
            self._flow.close()
        self._request.channel.count_when_final(self._count)
        for model in self._models.values():
            model.leave()
        self._on_end(self)
        self._request.release()

    def _count(self, final_ns: int) -> None:
        """An ensemble's times are the sums of those of its steps."""
        channel = self._request.channel
        statistics = channel.owner.statistics
        if self._failure is not None:
            statistics.record_failure(final_ns - channel.start_ns, FailureReason.OTHER)
            return
        input_ns, infer_ns, output_ns = self._compute_ns
        times = (0, input_ns, input_ns + infer_ns, input_ns + infer_ns + output_ns)
        batch_size = max(self._request.batch_size, 1)
        queue_ns = self._start_ns - self._request.queue_start_ns
        statistics.record_success(batch_size, final_ns - channel.start_ns, queue_ns, times)
        statistics.record_batch(batch_size, times)
        if channel.observer is not None:
            channel.observer.computed(times)


def _raising(error: TritonError) -> TakeValues:
    def take() -> NewValues:
        raise error.copy()

    return take


class EnsembleScheduler:
    def __init__(self, config: ModelConfig, host: ModelHost) -> None:
        self._graph = EnsembleGraph(config)
        self._host = host
        self._lock = threading.Lock()
        self._shapes: WeakKeyDictionary[ModelHandle, ModelShapes] = WeakKeyDictionary()
        self._runs: set[EnsembleRun] = set()
        self._stopped = False
        self._launcher = StepLauncher(config.name)
        self._limits: list[StepLimit] = []
        if max_running := self._graph.max_inflight_requests:
            subject = f"[Internal Error] Ensemble '{config.name}' step"
            self._limits = [StepLimit(max_running, f"{subject} {step.index}") for step in self._graph.steps]

    def __len__(self) -> int:
        """Requests that have not ended; if there are none, those still counted by a limit."""
        return len(self._runs) or sum(len(limit) for limit in self._limits)

    def enqueue(self, request: QueuedRequest) -> None:
        request.queue_start_ns = time.monotonic_ns()
        if self._stopped:
            raise unavailable(
                f"{request_tag(request.id)}Server is stopping, scheduler for model has stopped accepting new "
                f"inference requests"
            )
        try:
            models = self._acquire_models()
        except TritonError as error:
            request.fail(error.copy(f"in ensemble '{self._graph.name}', "), FailureReason.OTHER)
            return
        shapes = {key: self._shapes_of(model) for key, model in models.items()}
        run = EnsembleRun(self._graph, request, models, shapes, self._limits, self._launcher, self._forget)
        with self._lock:
            self._runs.add(run)
        run.start()

    def source(self) -> BatchSource:
        raise AssertionError("an ensemble has no instances")

    def leaked_resources(self) -> Mapping[str, int]:
        return {"requests in its flow": len(self)}

    def stop(self) -> None:
        self._stopped = True
        self._launcher.stop()

    def _acquire_models(self) -> dict[ModelKey, ModelHandle]:
        """Takes all composing models, so that the request finishes with the versions with which it started."""
        models: dict[ModelKey, ModelHandle] = {}
        try:
            for key in self._graph.models:
                models[key] = self._host.acquire_model(*key)
        except TritonError:
            for acquired in models.values():
                acquired.leave()
            raise
        return models

    def _shapes_of(self, model: ModelHandle) -> ModelShapes:
        with self._lock:
            shapes = self._shapes.get(model)
            if shapes is None:
                shapes = self._shapes[model] = ModelShapes.of(model.config)
            return shapes

    def _forget(self, run: EnsembleRun) -> None:
        with self._lock:
            self._runs.discard(run)
