"""Sequences (requests with the same correlation id), the slots of instances, and the table of both.

Invariants: a sequence has at most one slot; `Turn.done` is called exactly once for each turn that was not rescheduled.
Source: Triton's SequenceBatch, BatcherSequenceSlot and the release callbacks of its sequence batcher.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Thread
from typing import Protocol

from llmbackend.waiting.timer import Deadlines

from ...backend_api import RequestFlag
from ...errors import invalid_argument
from ...messages import Tenant
from ...requests.queued_request import QueuedRequest
from ..scheduler import ElasticSource
from .inputs import SequenceStates

SequenceKey = int | str | tuple[str, int] | tuple[str, str, int | str]
"""A client's correlation id (with its tenant), or an id of the host, which never equals a client's."""


@dataclass(eq=False, slots=True)
class Sequence:
    """The requests of one correlation id, from START to END.

    waiting: requests not yet given to an instance
    batch: the batch that has its slot; None = it is in the backlog
    is_ended: whether it takes no further requests
    running: requests for whose release the slot waits
    backlog_deadline_ns: when its time in the backlog ends (monotonic); 0 = never
    """

    key: SequenceKey
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    batch: SequenceBatch | None = None
    slot: int = -1
    is_ended: bool = False
    running: int = 0
    backlog_deadline_ns: int = 0
    states: SequenceStates | None = None

    @property
    def is_over(self) -> bool:
        return self.is_ended and not self.waiting and not self.running


class Slots:
    """The slots of one instance. They are created on demand, because a configuration may allow a million candidate
    sequences. The lowest free slot is used first, to keep batches small."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: dict[int, Sequence] = {}
        self._freed: list[int] = []
        self._unused = 0  # the lowest number never taken

    def __len__(self) -> int:
        """Taken slots."""
        return len(self._taken)

    def lowest_free(self) -> int | None:
        if self._freed:
            return self._freed[0]
        return self._unused if self._unused < self._count else None

    def take(self, sequence: Sequence) -> None:
        """Gives the sequence the lowest free slot. There must be one."""
        if self._freed:
            sequence.slot = heapq.heappop(self._freed)
        else:
            sequence.slot = self._unused
            self._unused += 1
        self._taken[sequence.slot] = sequence

    def free(self, sequence: Sequence) -> None:
        del self._taken[sequence.slot]
        heapq.heappush(self._freed, sequence.slot)
        sequence.slot = -1

    def in_order(self) -> list[tuple[int, Sequence]]:
        """The taken slots by number."""
        return sorted(self._taken.items(), key=lambda item: item[0])


class Turn:
    """The SequenceTurn of a request that has left its queue.

    is_tracked: whether the slot waits for its release
    was_handed_out: whether it was given to an instance
    """

    def __init__(self, owner: SequenceBatchOwner, sequence: Sequence, is_tracked: bool) -> None:
        self.sequence = sequence
        self.is_tracked = is_tracked
        self.was_handed_out = False
        self._owner = owner

    def done(self) -> None:
        self._owner.turn_done(self)

    def reschedule(self, request: QueuedRequest) -> None:
        self._owner.reschedule(self, request)


def turn_of(request: QueuedRequest) -> Turn:
    assert isinstance(request.turn, Turn), "a request of a sequence that is out of its queue has a turn"
    return request.turn


class SequenceBatchOwner(Protocol):
    """The sequence batcher as seen by its SequenceBatches and Turns."""

    def locked(self) -> AbstractContextManager[None]:
        """The batcher's lock."""

    def after_unlock(self, action: Callable[[], None]) -> None:
        """Calls `action` once the lock has been released. The caller holds the lock."""

    def take(self, sequence: Sequence, is_tracked: bool) -> QueuedRequest:
        """Takes the next request from the sequence's queue. is_tracked: the slot waits for its release; otherwise the
        caller calls `free_if_over`. The caller holds the lock."""

    def hand_out(self, sequence: Sequence, request: QueuedRequest) -> None:
        """Adds control inputs and states to a request before it is given to an instance."""

    def free_if_over(self, sequence: Sequence) -> None:
        """If the sequence is over, gives its slot to the next one. The caller holds the lock."""

    def admit(self, batch: SequenceBatch) -> None:
        """Sequences may get slots of the batch from now on."""

    def retire(self, batch: SequenceBatch) -> bool:
        """Sequences get no more slots of the batch, which stops with its last sequence. Returns whether it has any."""

    def turn_done(self, turn: Turn) -> None:
        """See SequenceTurn.done."""

    def reschedule(self, turn: Turn, request: QueuedRequest) -> None:
        """See SequenceTurn.reschedule."""


class SequenceBatch(ElasticSource, ABC):
    """The slots of one instance, and the source of its thread. Receives sequences between `admit` and `dismiss`, and
    keeps them until they end."""

    def __init__(self, slot_count: int, owner: SequenceBatchOwner) -> None:
        self.slots = Slots(slot_count)
        self._owner = owner

    def admit(self) -> None:
        self._owner.admit(self)

    def dismiss(self, thread: Thread) -> bool:
        return self._owner.retire(self)

    @abstractmethod
    def feed(self, sequence: Sequence) -> None:
        """Called when the sequence gets a request or slot, or a request is released. Holds the batcher's lock."""

    @abstractmethod
    def stop(self) -> None:
        """No further requests will come. Holds the batcher's lock."""


class Sequencer:
    """Finds the sequence to which a request belongs.

    is_iterative: a backend releases a request with RESCHEDULE to get it again; a request without a correlation id is a
        sequence of its own
    """

    def __init__(self, model: str, is_iterative: bool) -> None:
        self.is_iterative = is_iterative
        self._model = model
        self._next_id = itertools.count(1)

    def key(self, request: QueuedRequest) -> SequenceKey:
        """Raises TritonError INVALID_ARG for a request without a sequence."""
        if not request.correlation_id and self.is_iterative:
            request.correlation_id = next(self._next_id)
            request.flags = RequestFlag.SEQUENCE_START
            return ("iterative", request.correlation_id)
        if not request.correlation_id:
            raise invalid_argument(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )
        return client_key(request.correlation_id, request.tenant)


def client_key(correlation_id: int | str, tenant: Tenant) -> SequenceKey:
    """The same id from different tenants means different sequences."""
    return ("of", tenant.key_name, correlation_id) if tenant.key_name else correlation_id


class SequenceTable:
    """The sequences of one model. Only open ones can be found by id. The backlog is ordered by the start of the
    sequences. Deliberate difference from Triton: a sequence's idle time starts when it gets a slot, so that sequences
    from the backlog do not end as soon as they run.

    idle, backlog_deadlines: the caller ends the sequences that are due
    """

    def __init__(self, max_idle_us: int) -> None:
        self._max_idle_ns = max_idle_us * 1000
        self._open: dict[SequenceKey, Sequence] = {}
        self._batches: list[SequenceBatch] = []
        self._retired: list[SequenceBatch] = []
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        self.idle: Deadlines[Sequence] = Deadlines()
        self.backlog_deadlines: Deadlines[Sequence] = Deadlines()

    @property
    def open_count(self) -> int:
        return len(self._open)

    def add_batch(self, batch: SequenceBatch, now_ns: int) -> list[Sequence]:
        """Adds a batch. Returns the sequences from the backlog that got slots of it."""
        self._batches.append(batch)
        return self._place_backlog(now_ns)

    def retire_batch(self, batch: SequenceBatch) -> bool:
        """Gives no more of its slots to sequences. Returns whether it has any."""
        if batch in self._batches:
            self._batches.remove(batch)
        if len(batch.slots):
            self._retired.append(batch)
        return len(batch.slots) > 0

    def drop_if_empty(self, batch: SequenceBatch) -> bool:
        """Removes a retired batch if it has no sequences. Returns whether it did so."""
        if batch not in self._retired or len(batch.slots):
            return False
        self._retired.remove(batch)
        return True

    def find(self, key: SequenceKey) -> Sequence | None:
        """The open sequence with that id."""
        return self._open.get(key)

    def begin(self, key: SequenceKey) -> Sequence:
        """A new sequence, in the lowest free slot of all batches or else at the end of the backlog."""
        sequence = Sequence(key)
        self._open[key] = sequence
        if not self._place(sequence):
            self._backlog[sequence] = None
        return sequence

    def touch(self, sequence: Sequence, now_ns: int, timeout_us: int) -> None:
        """Called when a request of the sequence arrives: restarts its idle time. In the backlog, the shortest request
        timeout applies."""
        if sequence.batch is not None:
            self.idle.add(sequence, now_ns + self._max_idle_ns)
        elif timeout_us > 0:
            due_ns = now_ns + timeout_us * 1000
            sequence.backlog_deadline_ns = min(sequence.backlog_deadline_ns or due_ns, due_ns)
            self.backlog_deadlines.add(sequence, sequence.backlog_deadline_ns)

    def end(self, sequence: Sequence) -> None:
        """Called when no further request can join the sequence."""
        sequence.is_ended = True
        self.idle.discard(sequence)
        if self._open.get(sequence.key) is sequence:
            del self._open[sequence.key]

    def remove(self, sequence: Sequence, now_ns: int) -> list[Sequence]:
        """Removes a sequence that is over. Returns the sequences that got slots as a result."""
        self.backlog_deadlines.discard(sequence)
        batch = sequence.batch
        if batch is None:
            self._backlog.pop(sequence, None)
            return []
        batch.slots.free(sequence)
        sequence.batch = None
        return self._place_backlog(now_ns)

    def next_due_ns(self) -> int | None:
        due = [due for due in (self.idle.earliest_ns(), self.backlog_deadlines.earliest_ns()) if due is not None]
        return min(due, default=None)

    def clear(self) -> None:
        for sequence in list(self._open.values()):
            self.end(sequence)

    def _place_backlog(self, now_ns: int) -> list[Sequence]:
        placed = []
        while self._backlog and self._place(first := next(iter(self._backlog))):
            del self._backlog[first]
            self.backlog_deadlines.discard(first)
            if not first.is_ended:
                self.idle.add(first, now_ns + self._max_idle_ns)
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
