"""The sequence batcher: all requests of a sequence go to one instance, one after the other, in the slot it was given.

For: models with `sequence_batching`. Does not know: how slots become batches (SequenceDirect, SequenceOldest), whose
sequence a request is (iterative), what control inputs and states look like. Owner of every request that waits in a
sequence: each leaves in a batch or completed with an error. Invariants: one lock guards the table, the queues and the
lanes, and clients, backends and instances' queues are only called after it was given back (`later`); a sequence never
runs on past a request of it that was dropped: the ones behind it are cancelled and the sequence ends; a sequence that
is over or idle gives its slot to the first of the backlog.
Source: Triton's sequence_batch_scheduler.cc; golden transcript 42.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.errors import TritonError, cancelled, invalid_argument, unavailable
from llmbackend.core.requests.infer_request import NOT_RESCHEDULABLE, InferRequest
from llmbackend.core.requests.response_channel import ChannelOwner
from llmbackend.core.scheduling.scheduler import BatchSource
from llmbackend.core.statistics import FailureReason
from llmbackend.core.tenants import Tenant
from llmbackend.waiting.timer import Timer

from .iterative import IterativeSequencer, Sequencer, client_key
from .null_request import NullOwner
from .sequence import Sequence, SequenceKey
from .sequence_controls import SequenceControls
from .sequence_direct import SequenceDirect
from .sequence_lane import SequenceLane
from .sequence_oldest import SequenceOldest
from .sequence_state import StateRules
from .sequence_step import Step, step_of
from .sequence_table import SequenceTable

log = logging.getLogger(__name__)

STOPPED = "Server is stopping, scheduler for model has stopped accepting new inference requests"
TIMED_OUT = "timeout of the corresponding sequence has been expired"
LONGEST_ID_SHOWN = 256
NO_FLAGS = RequestFlag(0)


class SequenceBatcher:
    def __init__(self, config: ModelConfig, model: ChannelOwner, model_directory: Path, timer: Timer) -> None:
        """Raises TritonError INVALID_ARG for states whose initial values can not be made."""
        batching = config.sequence_batching
        self._config = config
        self._model = model
        self._timer = timer
        self._controls = SequenceControls(config)
        self._states = StateRules.of(config, model_directory)
        self._sequencer: Sequencer = IterativeSequencer() if batching.iterative_sequence else Sequencer()
        self._lock = threading.Lock()
        self._table = SequenceTable(batching.max_sequence_idle_microseconds)
        self._waiting: dict[InferRequest, Sequence] = {}
        self._running = 0
        self._later: list[Callable[[], None]] = []
        self._alarm_ns: int | None = None
        self._none_open = threading.Condition(self._lock)
        self._is_stopped = False

    def __len__(self) -> int:
        """Requests that wait, and those whose release their sequence waits for."""
        return len(self._waiting) + self._running

    # --- instances --------------------------------------------------------------------------------------------------

    def source(self, instance: str) -> BatchSource:
        """The slots of one more instance, from `admit` on."""
        return self._new_lane()

    def left_behind(self) -> Mapping[str, int]:
        return {"requests in its queue": len(self)}

    def stop(self) -> None:
        """Refuses new sequences; the instances get no more batches once their queues are empty."""
        with self.locked():
            self._is_stopped = True
            self._table.clear()
            for lane in self._table.lanes:
                lane.stop()
        self._timer.clear(self._on_alarm)

    def _new_lane(self) -> SequenceLane:
        if self._config.sequence_batching.HasField("oldest"):
            return SequenceOldest(self._config, self, self._model.statistics, self._timer)
        return SequenceDirect(self._config, self, self._lock, self._controls, self._states, NullOwner(self._model))

    # --- requests ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: InferRequest) -> None:
        """Takes the request over. Raises TritonError INVALID_ARG for one that is in no sequence, or UNAVAILABLE for a
        new sequence after `stop`, and leaves it with the caller."""
        if request.batch_size > 1:
            raise invalid_argument(
                f"inference request to model '{self._model.name}' must specify batch-size 1 due to requirements of "
                f"sequence batcher"
            )
        key = self._sequencer.key(request, self._model.name)
        request.channel.set_dequeue(partial(self._cancel, request))
        try:
            with self.locked():
                self._append(self._sequence_for(request, key), request)
        except TritonError:
            request.channel.set_dequeue(None)
            raise
        if request.is_cancelled:
            self._cancel(request)  # between the callback's registration and the queue

    def continues(self, correlation_id: int | str, flags: RequestFlag, tenant: Tenant) -> bool:
        """Whether such a request belongs to a sequence that runs."""
        with self._lock:
            is_start = RequestFlag.SEQUENCE_START in flags
            key = client_key(correlation_id, tenant)
            return not is_start and bool(correlation_id) and self._table.find(key) is not None

    def wait_until_none_is_open(self, timeout_s: float) -> bool:
        """Blocks until every sequence was ended, by its client or by being idle. False when time ran out."""
        with self._none_open:
            return self._none_open.wait_for(lambda: not self._table.open_count, timeout_s)

    @property
    def open_count(self) -> int:
        return self._table.open_count

    def _sequence_for(self, request: InferRequest, key: SequenceKey) -> Sequence:
        """Holds the lock."""
        is_start = RequestFlag.SEQUENCE_START in request.flags
        if self._is_stopped and is_start:
            raise unavailable(STOPPED)
        sequence = self._table.find(key)
        if sequence is None:
            if not is_start:
                raise self._must_start(request)
            return self._table.begin(key)
        if is_start:
            log.warning(
                "sequence %r for model '%s' has a conflict. The previous sequence did not end before this sequence "
                "start. Previous sequence will be terminated early.",
                str(request.correlation_id)[:LONGEST_ID_SHOWN],
                self._model.name,
            )
        return sequence

    def _must_start(self, request: InferRequest) -> TritonError:
        return invalid_argument(
            f"inference request for sequence {str(request.correlation_id)[:LONGEST_ID_SHOWN]} to model "
            f"'{self._model.name}' must specify the START flag on the first request of the sequence"
        )

    def _append(self, sequence: Sequence, request: InferRequest) -> None:
        """Holds the lock."""
        now_ns = request.queue_start_ns = time.monotonic_ns()
        self._table.touch(sequence, now_ns, request.timeout_us)
        sequence.waiting.append(request)
        self._waiting[request] = sequence
        self._model.statistics.add_pending(1)
        if RequestFlag.SEQUENCE_END in request.flags:
            self._end(sequence)
        self._feed([sequence])

    def _feed(self, sequences: list[Sequence]) -> None:
        """Tells lanes what they got. Holds the lock."""
        for sequence in sequences:
            if sequence.lane is not None:
                sequence.lane.feed(sequence)
        self._set_alarm()

    # --- the way of a sequence to its end ---------------------------------------------------------------------------

    def _end(self, sequence: Sequence) -> None:
        """Holds the lock."""
        self._table.end(sequence)
        if not self._table.open_count:
            self._none_open.notify_all()

    def _break_off(self, sequence: Sequence, count: int, error: TritonError, reason: FailureReason) -> None:
        """Ends a sequence after `count` of its requests; those behind are answered with `error`. Holds the lock."""
        kept = [sequence.waiting.popleft() for _ in range(count)]
        for request in sequence.waiting:
            self._forget(request)
            self.later(partial(request.fail, error, reason))
        sequence.waiting.clear()
        sequence.waiting.extend(kept)
        self._end(sequence)
        self.settle(sequence)

    def _cancel(self, request: InferRequest) -> None:
        """Runs on the canceller's thread; a request that an instance took meanwhile is the backend's to cancel."""
        with self.locked():
            sequence = self._waiting.get(request)
            if sequence is not None:
                position = sequence.waiting.index(request)
                self._break_off(sequence, position, cancelled("Request cancelled"), FailureReason.CANCELED)

    def _set_alarm(self) -> None:
        """One alarm for the earliest time at which something is due. Holds the lock."""
        due_ns = self._table.next_due_ns()
        if due_ns is not None and not self._is_stopped and (self._alarm_ns is None or due_ns < self._alarm_ns):
            self._alarm_ns = due_ns
            self._timer.set(self._on_alarm, due_ns)

    def _on_alarm(self) -> None:
        """On the timer's thread."""
        with self.locked():
            self._alarm_ns = None
            now_ns = time.monotonic_ns()
            for sequence in self._table.take_idle(now_ns):
                log.debug("model '%s': a sequence was idle for too long", self._model.name)
                self._end(sequence)
                self.settle(sequence)
            for sequence in self._table.take_impatient(now_ns):
                self._break_off(sequence, 0, unavailable(TIMED_OUT), FailureReason.REJECTED)
            self._set_alarm()

    # --- what lanes ask for (LaneOwner) -----------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock:
            yield
            later, self._later = self._later, []
        for action in later:
            action()

    def later(self, action: Callable[[], None]) -> None:
        self._later.append(action)

    def take(self, sequence: Sequence, is_tracked: bool) -> InferRequest:
        request = sequence.waiting.popleft()
        self._forget(request)
        step = Step(self, sequence, is_tracked or self._sequencer.is_iterative)
        if step.is_tracked:
            sequence.running += 1
            self._running += 1
        request.step = step
        return request

    def hand_out(self, sequence: Sequence, request: InferRequest) -> None:
        if RequestFlag.SEQUENCE_START in request.flags or sequence.states is None:
            sequence.states = self._states.new_states()
        step_of(request).was_handed_out = True
        request.states = sequence.states
        controls = self._controls.inputs(request.flags, request.correlation_id)
        request.give_inputs(controls | (sequence.states.inputs() if sequence.states is not None else {}))

    def settle(self, sequence: Sequence) -> None:
        if sequence.is_over:
            lane = sequence.lane
            self._feed(self._table.remove(sequence, time.monotonic_ns()))
            if lane is not None and self._table.drop_if_empty(lane):
                lane.stop()

    def admit(self, lane: SequenceLane) -> None:
        with self.locked():
            self._feed(self._table.add_lane(lane, time.monotonic_ns()))

    def retire(self, lane: SequenceLane) -> bool:
        with self.locked():
            has_sequences = self._table.retire_lane(lane)
            if not has_sequences:
                lane.stop()
            return has_sequences

    def _forget(self, request: InferRequest) -> None:
        """A request leaves its queue. Holds the lock."""
        del self._waiting[request]
        self._model.statistics.add_pending(-1)
        self.later(partial(request.channel.set_dequeue, None))

    # --- what released requests ask for (StepOwner) -----------------------------------------------------------------

    def step_done(self, step: Step) -> None:
        if not step.is_tracked:
            return
        sequence = step.sequence
        with self.locked():
            sequence.running -= 1
            self._running -= 1
            if self._sequencer.is_iterative or not step.was_handed_out:
                self._break_off(sequence, 0, cancelled("Request cancelled"), FailureReason.CANCELED)
            elif sequence.is_over:
                self.settle(sequence)
            else:
                self._feed([sequence])

    def reschedule(self, step: Step, request: InferRequest) -> None:
        if not self._sequencer.is_iterative or RequestFlag.SEQUENCE_END in request.flags:
            raise invalid_argument(NOT_RESCHEDULABLE)
        sequence = step.sequence
        request.channel.set_dequeue(partial(self._cancel, request))
        try:
            with self.locked():
                if sequence.is_ended:
                    raise self._must_start(request)
                sequence.running -= 1
                self._running -= 1
                request.take_back()
                self._append(sequence, request)
        except TritonError:
            request.channel.set_dequeue(None)
            raise
        if request.is_cancelled:
            self._cancel(request)
