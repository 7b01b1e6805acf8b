"""One request of an ensemble, from its inputs to its last response.

For: EnsembleScheduler. Does not know: how composing models work, who asked. Owner of the ensemble's request and of one
handle on each composing model, so that none of them is finalised under it. Invariants: the request has exactly one
final response; it is counted and released when the last request of its steps is gone; a failure or a cancellation stops
the steps whose results nobody wants any more. A failure has its place in the stream: what comes before it is answered.
What a stream keeps waiting for a slot of a step is bounded in bytes; the response that is too much is such a failure.
Source: EnsembleContext in Triton's ensemble_scheduler.cc. By design different: cancellation also reaches steps that
have started; a failed request does not wait for results that nobody wants.

Locks: a step's response callback, which comes under locks of that step's model, takes the run's lock, under which only
the ensemble's own channel is called. Whatever reaches other models (starting and cancelling steps) is left to the
ensemble's launcher, under no lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from llmbackend.core.backend_api import RequestFlag, ResponseFlag
from llmbackend.core.errors import TritonError, cancelled, internal, invalid_argument, request_tag, unavailable
from llmbackend.core.messages import InferenceHandle, InferenceRequest, InferenceResponse
from llmbackend.core.requests.held_bytes import held_bytes
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.statistics import FailureReason, PhaseTimes
from llmbackend.core.tensors import Tensor
from llmbackend.core.tracing.trace import child_of

from .ensemble_flow import EnsembleFlow, Fresh
from .ensemble_graph import EnsembleGraph, ModelKey
from .ensemble_step import ComposingModel, StepRequest
from .ensemble_values import Origin, SequenceTag
from .step_launcher import StepLauncher
from .step_limit import StepLimit

log = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 4 << 20
"""What one request's stream may keep waiting for a slot of one step: as much as may wait for a client."""
News = Callable[[], Fresh] | TritonError
"""How to take in new values, or why there will be none."""


class EnsembleRun:
    def __init__(
        self,
        graph: EnsembleGraph,
        request: InferRequest,
        models: Mapping[ModelKey, ComposingModel],
        limits: Sequence[StepLimit],
        launcher: StepLauncher,
        on_end: Callable[[EnsembleRun], None],
    ) -> None:
        self._graph = graph
        self._request = request
        self._models = models
        self._limits = limits  # one for each step, or none
        self._launcher = launcher
        self._on_end = on_end
        self._start_ns = time.monotonic_ns()
        self._lock = threading.Lock()
        self._flow = EnsembleFlow(graph, request, {key: model.shapes for key, model in models.items()})
        self._running: set[StepRequest] = set()  # the last response of these has not come
        self._waiting_bytes: Counter[int] = Counter()  # of each step: what waits for a slot
        self._open_steps = 0  # how many are not gone yet
        self._compute_ns = [0, 0, 0]
        self._failure: tuple[Origin, TritonError] | None = None
        self._is_cancelled = False
        self._has_responded = False
        self._is_final = False
        self._is_ended = False

    def wants(self, step_request: StepRequest) -> bool:
        """Whether what it still makes can be part of the answer."""
        failure = self._failure
        return not self._is_cancelled and (failure is None or step_request.next_origin < failure[0])

    def start(self) -> None:
        self._request.on_cancel(self._cancel)
        self._act(*self._proceed(self._flow.take_inputs))
        self._end_if_over()

    # --- what happens to a step (any thread) ------------------------------------------------------------------------

    def send(self, step_request: StepRequest) -> InferenceHandle:
        """Raises TritonError when the step's model refuses it, or when the run was stopped meanwhile."""
        self._waits_no_more(step_request)
        if not self.wants(step_request):
            raise cancelled("Request cancelled")
        step, request = step_request.step, self._request
        correlation_id, flags = step_request.sequence
        return self._models[step.model].infer(
            InferenceRequest(
                model_name=step.model[0],
                response_callback=step_request,
                id=request.id,
                inputs=step_request.inputs,
                requested_outputs=tuple(step.outputs),
                parameters=request.parameters,
                correlation_id=correlation_id,
                flags=flags,
                priority=request.priority,
                timeout_us=request.timeout_us,
                observer=step_request,
                trace=child_of(request.trace),
                tenant=request.tenant,
            )
        )

    def responded(self, step_request: StepRequest, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        is_last = bool(flags & ResponseFlag.FINAL)
        if is_last and self._limits:
            limit = self._limits[step_request.step.index]
            limit.finished()
            self._launcher.submit(limit.start_waiting)
        news: News = partial(self._flow.take_outputs, step_request, response)
        if response is not None and response.error is None and self._waiting_bytes:
            news = self._too_far_ahead(step_request) or news
        ready, unwanted = self._proceed(news, step_request, is_last)
        if ready or unwanted:
            self._launcher.submit(partial(self._act, ready, unwanted))

    def refused(self, step_request: StepRequest, error: TritonError) -> None:
        """It was started, but is not under way at its model."""
        if self._limits:
            self._limits[step_request.step.index].finished()
            self._limits[step_request.step.index].start_waiting()
        self._give_up(step_request, error)

    def make_room(self, step_request: StepRequest) -> None:
        """Holds a decoupled model back while a step behind it has as many requests as it may have, here or in an
        ensemble that this one is a step of."""
        if not step_request.is_decoupled:
            return
        for index in self._flow.all_behind(step_request.step) if self._limits else ():
            self._limits[index].make_room(lambda: not self.wants(step_request))
        outer = self._request.channel.observer
        if outer is not None:
            outer.make_room()

    def _too_far_ahead(self, step_request: StepRequest) -> TritonError | None:
        """Why a response of that step can not be kept, if it can not."""
        for reader in self._flow.readers_of(step_request.step):
            if self._waiting_bytes[reader.index] >= MAX_WAITING_BYTES:
                return unavailable(
                    f"the request was cancelled: model '{step_request.step.model[0]}' answers faster than model "
                    f"'{reader.model[0]}' takes it, more than {MAX_WAITING_BYTES} bytes were waiting"
                )
        return None

    def _waits_no_more(self, step_request: StepRequest) -> None:
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
            self._open_steps -= 1
        self._end_if_over()

    def _cancel(self) -> None:
        """On the canceller's thread."""
        with self._lock:
            self._is_cancelled = True
            running = list(self._running)
        self._launcher.submit(partial(self._stop, running))

    # --- the flow ---------------------------------------------------------------------------------------------------

    def _proceed(
        self, news: News, by: StepRequest | None = None, is_over: bool = False
    ) -> tuple[list[StepRequest], list[StepRequest]]:
        """Takes new values in and sends the responses that they complete; the steps to start, and those to stop.
        `is_over`: it was the last that comes `by` that step."""
        with self._lock:
            origin = by.next_origin if by is not None else ()
            if by is not None and is_over:
                by.is_over = True
                self._running.discard(by)
            failure = self._failure
            ready = [] if self._is_final else self._advance(news, origin)
            unwanted = [] if self._failure is failure else [one for one in self._running if not self.wants(one)]
            if self._limits:
                self._count_waiting(ready)
        if self._limits:
            for step_request in ready:
                self._limits[step_request.step.index].add(step_request)
        return ready, unwanted

    def _count_waiting(self, ready: Iterable[StepRequest]) -> None:
        """Holds the lock."""
        for step_request in ready:
            if step_request.is_of_stream:
                step_request.waiting_bytes = held_bytes(step_request.inputs)
                self._waiting_bytes[step_request.step.index] += step_request.waiting_bytes

    def _advance(self, news: News, origin: Origin) -> list[StepRequest]:
        """The steps to start next; finishes the request when there is nothing left to wait for. Holds the lock."""
        ready: list[StepRequest] = []
        try:
            fresh = self._take(news, origin)
            ready = self._flow.next_steps(fresh, self)
            self._running.update(ready)
            self._open_steps += len(ready)
            self._respond(fresh)
        except TritonError as error:
            self._fail(origin, error)
        except Exception as error:
            log.exception("ensemble '%s' failed", self._graph.name)
            self._fail(origin, internal(f"{type(error).__name__}: {error}"))
        if not self._is_final and self._is_settled():
            self._finish()
        return ready

    def _take(self, news: News, origin: Origin) -> Fresh:
        """Raises TritonError when the news are bad."""
        if self._failure is not None and origin >= self._failure[0]:
            return (), origin
        if isinstance(news, TritonError):
            raise TritonError(news.message, news.code)
        return news()

    def _fail(self, origin: Origin, error: TritonError) -> None:
        # A new error: the traceback of the given one holds frames, and they hold requests.
        self._failure = origin, TritonError(f"in ensemble '{self._graph.name}', {error.message}", error.code)

    def _is_settled(self) -> bool:
        if self._failure is not None:
            return not self._flow.may_come_before(self._failure[0])
        return not self._running

    def _act(self, ready: Sequence[StepRequest], unwanted: Sequence[StepRequest]) -> None:
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
                self._waits_no_more(step_request)
                self._give_up(step_request, cancelled("Request cancelled"))
            else:
                step_request.cancel()

    def _give_up(self, step_request: StepRequest, error: TritonError) -> None:
        self._act(*self._proceed(error, step_request, is_over=True))
        self.step_gone()

    # --- the answer -------------------------------------------------------------------------------------------------

    def _respond(self, fresh: Fresh) -> None:
        """Sends the responses that are complete with `fresh` values, up to a failure. Holds the lock."""
        before = None if self._failure is None else self._failure[0]
        for outputs, sequence, has_next in self._flow.responses(fresh, before):
            self._has_responded = True
            self._is_final = not self._running and not has_next and before is None
            self._send(outputs, sequence, ResponseFlag.FINAL if self._is_final else ResponseFlag.NONE)

    def _send(self, outputs: Iterable[Tensor], sequence: SequenceTag | None, flags: ResponseFlag) -> None:
        response = self._request.new_response()
        for tensor in outputs:
            response.add_output(tensor)
        if sequence is not None:
            correlation_id, sequence_flags = sequence
            response.set_parameter("sequence_id", correlation_id)
            response.set_parameter("sequence_start", RequestFlag.SEQUENCE_START in sequence_flags)
            response.set_parameter("sequence_end", RequestFlag.SEQUENCE_END in sequence_flags)
        response.send(flags)

    def _finish(self) -> None:
        """Ends the request for its client. Holds the lock."""
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
            if not self._is_final or self._open_steps or self._is_ended:
                return
            self._is_ended = True
            self._flow.close()
        self._request.channel.when_final(self._count)
        for model in self._models.values():
            model.leave()
        self._on_end(self)
        self._request.release()

    def _count(self, final_ns: int) -> None:
        """An ensemble's times are the sums of its steps' times."""
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
