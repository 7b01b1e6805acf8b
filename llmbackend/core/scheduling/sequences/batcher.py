"""The sequence batcher: all requests of a sequence are executed in order by one instance, in the sequence's slot.

Invariants: each waiting request leaves in a batch or is completed with an error; a sequence never continues after a
dropped request. Source: Triton's sequence_batch_scheduler.cc; golden transcript 42.
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

from llmbackend.waiting.timer import Timer

from ...backend_api import RequestFlag
from ...errors import TritonError, cancelled, invalid_argument, shown_id, unavailable
from ...messages import Tenant
from ...metrics.model_metrics import FailureReason
from ...requests.queued_request import NOT_RESCHEDULABLE, QueuedRequest
from ...requests.response_channel import ChannelOwner
from ..scheduler import BatchSource
from .inputs import SequenceControls, StateRules
from .sequence import Sequence, SequenceBatch, SequenceKey, Sequencer, SequenceTable, Turn, client_key, turn_of
from .strategies import DirectSequenceBatch, NullOwner, OldestSequenceBatch

log = logging.getLogger(__name__)

STOPPED = "Server is stopping, scheduler for model has stopped accepting new inference requests"
TIMED_OUT = "timeout of the corresponding sequence has been expired"


class SequenceBatcher:
    """A Scheduler and a SequenceBatchOwner. Thread-safe.

    One lock guards the table, the queues and the sequence batches; clients, backends and instances' queues are called
    after it has been released (`after_unlock`). After a dropped request the others are cancelled and the sequence ends.
    When a sequence is over or idle, its slot goes to the first one in the backlog.
    """

    def __init__(self, config: ModelConfig, model: ChannelOwner, model_directory: Path, timer: Timer) -> None:
        """Raises TritonError INVALID_ARG for states without valid initial values."""
        batching = config.sequence_batching
        self._config = config
        self._model = model
        self._timer = timer
        self._controls = SequenceControls(config)
        self._states = StateRules.of(config, model_directory)
        self._sequencer = Sequencer(model.name, batching.iterative_sequence)
        self._lock = threading.Lock()
        self._table = SequenceTable(batching.max_sequence_idle_microseconds)
        self._waiting: dict[QueuedRequest, Sequence] = {}
        self._running = 0
        self._batches: set[SequenceBatch] = set()  # those not stopped, also before `admit`
        self._after_unlock: list[Callable[[], None]] = []
        self._alarm_ns: int | None = None
        self._none_open = threading.Condition(self._lock)
        self._is_stopped = False

    def __len__(self) -> int:
        """Waiting requests, and requests for whose release their sequence waits."""
        return len(self._waiting) + self._running

    # --- instances --------------------------------------------------------------------------------------------------

    def source(self) -> BatchSource:
        """The slots of one more instance; used after `admit`."""
        batch = self._new_batch()
        with self._lock:
            self._batches.add(batch)
        return batch

    def _new_batch(self) -> SequenceBatch:
        if self._config.sequence_batching.HasField("oldest"):
            return OldestSequenceBatch(self._config, self, self._model.statistics, self._timer)
        return DirectSequenceBatch(self._config, self, self._lock, self._controls, self._states, NullOwner(self._model))

    def leaked_resources(self) -> Mapping[str, int]:
        return {"requests in its queue": len(self)}

    def stop(self) -> None:
        """Refuses new sequences. The instances get no more batches once their queues are empty."""
        with self.locked():
            self._is_stopped = True
            self._table.clear()
            for batch in tuple(self._batches):
                self._stop_batch(batch)
        self._timer.clear(self._on_alarm)

    # --- requests ---------------------------------------------------------------------------------------------------

    def enqueue(self, request: QueuedRequest) -> None:
        """Raises TritonError INVALID_ARG for a request without a sequence, UNAVAILABLE for a new sequence after `stop`;
        see Scheduler."""
        if request.batch_size > 1:
            raise invalid_argument(
                f"inference request to model '{self._model.name}' must specify batch-size 1 due to requirements of "
                f"sequence batcher"
            )
        key = self._sequencer.key(request)
        request.channel.set_dequeue(partial(self._cancel, request))
        try:
            with self.locked():
                self._append(self._sequence_for(request, key), request)
        except TritonError:
            request.channel.set_dequeue(None)
            raise
        if request.is_cancelled:
            self._cancel(request)  # cancelled before it was queued

    def continues(self, correlation_id: int | str, flags: RequestFlag, tenant: Tenant) -> bool:
        """Whether such a request belongs to an open sequence."""
        with self._lock:
            is_start = RequestFlag.SEQUENCE_START in flags
            key = client_key(correlation_id, tenant)
            return not is_start and bool(correlation_id) and self._table.find(key) is not None

    def wait_until_none_is_open(self, timeout_s: float) -> bool:
        """Blocks until all sequences have ended, explicitly or by idling out. False after `timeout_s`."""
        with self._none_open:
            return self._none_open.wait_for(lambda: not self._table.open_count, timeout_s)

    @property
    def open_count(self) -> int:
        return self._table.open_count

    def _sequence_for(self, request: QueuedRequest, key: SequenceKey) -> Sequence:
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
                shown_id(request.correlation_id),
                self._model.name,
            )
        return sequence

    def _must_start(self, request: QueuedRequest) -> TritonError:
        return invalid_argument(
            f"inference request for sequence {shown_id(request.correlation_id)} to model "
            f"'{self._model.name}' must specify the START flag on the first request of the sequence"
        )

    def _append(self, sequence: Sequence, request: QueuedRequest) -> None:
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
        """Notifies the sequence batches of new requests or slots. Holds the lock."""
        for sequence in sequences:
            if sequence.batch is not None:
                sequence.batch.feed(sequence)
        self._set_alarm()

    # --- the end of a sequence --------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence) -> None:
        """Holds the lock."""
        self._table.end(sequence)
        if not self._table.open_count:
            self._none_open.notify_all()

    def _end_after(self, sequence: Sequence, count: int, error: TritonError, reason: FailureReason) -> None:
        """Keeps the first `count` waiting requests, fails the others and ends the sequence. Holds the lock."""
        kept = [sequence.waiting.popleft() for _ in range(count)]
        for request in sequence.waiting:
            self._forget(request)
            self.after_unlock(partial(request.fail, error, reason))
        sequence.waiting.clear()
        sequence.waiting.extend(kept)
        self._end(sequence)
        self.free_if_over(sequence)

    def _cancel(self, request: QueuedRequest) -> None:
        """Called on the cancelling thread. Requests already given to an instance are cancelled by the backend."""
        with self.locked():
            sequence = self._waiting.get(request)
            if sequence is not None:
                position = sequence.waiting.index(request)
                self._end_after(sequence, position, cancelled("Request cancelled"), FailureReason.CANCELED)

    def _set_alarm(self) -> None:
        """Sets a single alarm for the earliest timeout. Holds the lock."""
        due_ns = self._table.next_due_ns()
        if due_ns is not None and not self._is_stopped and (self._alarm_ns is None or due_ns < self._alarm_ns):
            self._alarm_ns = due_ns
            self._timer.set(self._on_alarm, due_ns)

    def _on_alarm(self) -> None:
        """Called on the timer's thread."""
        with self.locked():
            self._alarm_ns = None
            now_ns = time.monotonic_ns()
            for sequence in self._table.idle.pop_due(now_ns):
                log.debug("model '%s': a sequence was idle for too long", self._model.name)
                self._end(sequence)
                self.free_if_over(sequence)
            for sequence in self._table.backlog_deadlines.pop_due(now_ns):
                self._end_after(sequence, 0, unavailable(TIMED_OUT), FailureReason.REJECTED)
            self._set_alarm()

    # --- SequenceBatchOwner -----------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._lock:
            yield
            actions, self._after_unlock = self._after_unlock, []
        for action in actions:
            action()

    def after_unlock(self, action: Callable[[], None]) -> None:
        self._after_unlock.append(action)

    def take(self, sequence: Sequence, is_tracked: bool) -> QueuedRequest:
        request = sequence.waiting.popleft()
        self._forget(request)
        turn = Turn(self, sequence, is_tracked or self._sequencer.is_iterative)
        if turn.is_tracked:
            sequence.running += 1
            self._running += 1
        request.turn = turn
        return request

    def hand_out(self, sequence: Sequence, request: QueuedRequest) -> None:
        if RequestFlag.SEQUENCE_START in request.flags or sequence.states is None:
            sequence.states = self._states.new_states()
        turn_of(request).was_handed_out = True
        request.states = sequence.states
        controls = self._controls.inputs(request.flags, request.correlation_id)
        request.add_inputs(controls | (sequence.states.inputs() if sequence.states is not None else {}))

    def free_if_over(self, sequence: Sequence) -> None:
        if sequence.is_over:
            batch = sequence.batch
            self._feed(self._table.remove(sequence, time.monotonic_ns()))
            if batch is not None and self._table.drop_if_empty(batch):
                self._stop_batch(batch)

    def admit(self, batch: SequenceBatch) -> None:
        with self.locked():
            self._feed(self._table.add_batch(batch, time.monotonic_ns()))

    def retire(self, batch: SequenceBatch) -> bool:
        with self.locked():
            has_sequences = self._table.retire_batch(batch)
            if not has_sequences:
                self._stop_batch(batch)
            return has_sequences

    def _stop_batch(self, batch: SequenceBatch) -> None:
        """Holds the lock."""
        self._batches.discard(batch)
        batch.stop()

    def _forget(self, request: QueuedRequest) -> None:
        """Removes a request from the queue's bookkeeping. Holds the lock."""
        del self._waiting[request]
        self._model.statistics.add_pending(-1)
        self.after_unlock(partial(request.channel.set_dequeue, None))

    # --- turns ------------------------------------------------------------------------------------------------------

    def turn_done(self, turn: Turn) -> None:
        if not turn.is_tracked:
            return
        sequence = turn.sequence
        with self.locked():
            sequence.running -= 1
            self._running -= 1
            if self._sequencer.is_iterative or not turn.was_handed_out:
                self._end_after(sequence, 0, cancelled("Request cancelled"), FailureReason.CANCELED)
            elif sequence.is_over:
                self.free_if_over(sequence)
            else:
                self._feed([sequence])

    def reschedule(self, turn: Turn, request: QueuedRequest) -> None:
        if not self._sequencer.is_iterative or RequestFlag.SEQUENCE_END in request.flags:
            raise invalid_argument(NOT_RESCHEDULABLE)
        sequence = turn.sequence
        request.channel.set_dequeue(partial(self._cancel, request))
        try:
            with self.locked():
                if sequence.is_ended:
                    raise self._must_start(request)
                sequence.running -= 1
                self._running -= 1
                request.reset_for_reschedule()
                self._append(sequence, request)
        except TritonError:
            request.channel.set_dequeue(None)
            raise
        if request.is_cancelled:
            self._cancel(request)
