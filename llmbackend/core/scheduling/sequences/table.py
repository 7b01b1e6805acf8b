"""Which sequences there are: their ids, their slots, the backlog, and when each is idle for too long.

For: SequenceBatcher, which guards it with its lock. Does not know: what requests contain, threads, responses.
Invariants: a sequence is open from its first request until END, a timeout or a dropped request; until it is over it is
in one slot or in the backlog.
Source: Triton's SequenceBatchScheduler, Sequencer and IterativeSequencer.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

from llmbackend.core.backend_api import RequestFlag
from llmbackend.core.errors import invalid_argument
from llmbackend.core.messages import Tenant
from llmbackend.core.requests.queued_request import QueuedRequest
from llmbackend.waiting.timer import Deadlines

from .sequence import Sequence, SequenceBatch, SequenceKey

_UINT64 = (1 << 64) - 1


class Sequencer:
    """The sequence of a request, by its correlation id."""

    is_iterative = False

    def key(self, request: QueuedRequest, model: str) -> SequenceKey:
        """Raises TritonError INVALID_ARG for a request without a correlation id."""
        if not request.correlation_id:
            raise invalid_argument(
                f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
            )
        return _client_key(request)


class IterativeSequencer(Sequencer):
    """For iterative sequences, where a backend releases a request with RESCHEDULE to get it again: a request without a
    correlation id is a sequence of its own."""

    is_iterative = True

    def __init__(self) -> None:
        self._next_id = itertools.count(1)

    def key(self, request: QueuedRequest, model: str) -> SequenceKey:
        if request.correlation_id:
            return _client_key(request)
        request.correlation_id = next(self._next_id)
        request.flags = RequestFlag.SEQUENCE_START
        return ("iterative", request.correlation_id)


def _client_key(request: QueuedRequest) -> SequenceKey:
    if isinstance(request.correlation_id, int):
        request.correlation_id &= _UINT64  # gRPC carries it as a signed integer
    return client_key(request.correlation_id, request.tenant)


def client_key(correlation_id: int | str, tenant: Tenant) -> SequenceKey:
    """The key of a client's correlation id: equal ids of different tenants are different sequences."""
    return ("of", tenant.key_name, correlation_id) if tenant.key_name else correlation_id


class SequenceTable:
    """The sequences of one model.

    Only an open sequence is found by its id; an id that the host makes for a single request never equals a client's.
    The backlog is served in the order in which sequences began. By design different from Triton: idleness is counted
    from when a sequence got its slot, so that sequences from a backlog do not end as soon as they run.
    """

    def __init__(self, max_idle_us: int) -> None:
        self._max_idle_ns = max_idle_us * 1000
        self._open: dict[SequenceKey, Sequence] = {}
        self._batches: list[SequenceBatch] = []
        self._retired: list[SequenceBatch] = []
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        self._idle: Deadlines[Sequence] = Deadlines()
        self._backlog_deadlines: Deadlines[Sequence] = Deadlines()

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def batches(self) -> list[SequenceBatch]:
        """All sequence batches that have or may get sequences."""
        return [*self._batches, *self._retired]

    def add_batch(self, batch: SequenceBatch, now_ns: int) -> list[Sequence]:
        """Adds a sequence batch; returns the sequences of the backlog that got slots of it."""
        self._batches.append(batch)
        return self._place_backlog(now_ns)

    def retire_batch(self, batch: SequenceBatch) -> bool:
        """No further sequence gets a slot of it. Returns whether any has one."""
        if batch in self._batches:
            self._batches.remove(batch)
        if len(batch.slots):
            self._retired.append(batch)
        return len(batch.slots) > 0

    def drop_if_empty(self, batch: SequenceBatch) -> bool:
        """Removes a retired sequence batch without sequences. Returns whether it was one."""
        if batch not in self._retired or len(batch.slots):
            return False
        self._retired.remove(batch)
        return True

    def find(self, key: SequenceKey) -> Sequence | None:
        """The open sequence with that id."""
        return self._open.get(key)

    def begin(self, key: SequenceKey) -> Sequence:
        """A new sequence in the lowest free slot of all batches, else at the end of the backlog."""
        sequence = Sequence(key)
        self._open[key] = sequence
        if not self._place(sequence):
            self._backlog[sequence] = None
        return sequence

    def touch(self, sequence: Sequence, now_ns: int, timeout_us: int) -> None:
        """A request of the sequence came: restarts its idle time. In the backlog the shortest request timeout
        counts."""
        if sequence.batch is not None:
            self._idle.add(sequence, now_ns + self._max_idle_ns)
        elif timeout_us > 0:
            due_ns = now_ns + timeout_us * 1000
            sequence.backlog_deadline_ns = min(sequence.backlog_deadline_ns or due_ns, due_ns)
            self._backlog_deadlines.add(sequence, sequence.backlog_deadline_ns)

    def end(self, sequence: Sequence) -> None:
        """No further request joins the sequence."""
        sequence.is_ended = True
        self._idle.discard(sequence)
        if self._open.get(sequence.key) is sequence:
            del self._open[sequence.key]

    def remove(self, sequence: Sequence, now_ns: int) -> list[Sequence]:
        """Removes a sequence that is over. Returns the sequences that got a slot by it."""
        self._backlog_deadlines.discard(sequence)
        batch = sequence.batch
        if batch is None:
            self._backlog.pop(sequence, None)
            return []
        batch.slots.free(sequence)
        sequence.batch = None
        return self._place_backlog(now_ns)

    def take_idle(self, now_ns: int) -> list[Sequence]:
        """Removes and returns sequences that were idle for too long; the caller ends them."""
        return self._idle.pop_due(now_ns)

    def take_backlog_timeouts(self, now_ns: int) -> list[Sequence]:
        """Removes and returns sequences whose time in the backlog is over; the caller ends them."""
        return self._backlog_deadlines.pop_due(now_ns)

    def next_due_ns(self) -> int | None:
        due = [due for due in (self._idle.earliest_ns(), self._backlog_deadlines.earliest_ns()) if due is not None]
        return min(due, default=None)

    def clear(self) -> None:
        for sequence in list(self._open.values()):
            self.end(sequence)

    def _place_backlog(self, now_ns: int) -> list[Sequence]:
        placed = []
        while self._backlog and self._place(first := next(iter(self._backlog))):
            del self._backlog[first]
            self._backlog_deadlines.discard(first)
            if not first.is_ended:
                self._idle.add(first, now_ns + self._max_idle_ns)
            placed.append(first)
        return placed

    def _place(self, sequence: Sequence) -> bool:
        best: tuple[int, SequenceBatch] | None = None
        for batch in self._batches:
            number = batch.slots.lowest_free()
            if number is not None and (best is None or number < best[0]):
                best = (number, batch)
        if best is None:
            return False
        sequence.batch = best[1]
        sequence.batch.slots.take(sequence)
        return True
