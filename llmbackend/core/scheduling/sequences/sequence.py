"""A sequence of requests with one correlation id, and what an instance has for its sequences: slots and batches.

For: SequenceBatcher, SequenceTable and the strategies. Does not know: how a strategy forms batches, clocks, clients.
Invariants: a sequence has at most one slot; `Turn.done` is called exactly once for each turn that was not rescheduled.
Source: Triton's SequenceBatch, BatcherSequenceSlot and the release callbacks of its sequence batcher.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Thread
from typing import Protocol

from llmbackend.core.requests.queued_request import QueuedRequest

from .inputs import SequenceStates

SequenceKey = int | str | tuple[str, int] | tuple[str, str, int | str]
"""A client's correlation id (with its tenant), or one of the host, which never equals a client's."""


@dataclass(eq=False, slots=True)
class Sequence:
    """The requests of one correlation id, from the one with START to the one with END."""

    key: SequenceKey
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    """Requests that no instance has yet."""
    batch: SequenceBatch | None = None
    """Where it has its slot; None = it is in the backlog."""
    slot: int = -1
    is_ended: bool = False
    """Whether no further request joins."""
    running: int = 0
    """Requests whose release the slot waits for."""
    backlog_deadline_ns: int = 0
    """When its time in the backlog is over (monotonic); 0 = never."""
    states: SequenceStates | None = None

    @property
    def is_over(self) -> bool:
        """Whether it is ended and none of its requests waits or runs."""
        return self.is_ended and not self.waiting and not self.running


class Slots:
    """The slots of one instance.

    A slot is made when it is first needed, so that a configuration that asks for a million candidate sequences costs
    nothing. The lowest free number is given out first, so that batches stay small.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: dict[int, Sequence] = {}
        self._freed: list[int] = []
        self._unused = 0  # the lowest number that was never taken

    def __len__(self) -> int:
        """How many are taken."""
        return len(self._taken)

    def lowest_free(self) -> int | None:
        if self._freed:
            return self._freed[0]
        return self._unused if self._unused < self._count else None

    def take(self, sequence: Sequence) -> None:
        """Gives the sequence the lowest free slot, which must exist."""
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
        """The taken slots with their sequences, by number."""
        return sorted(self._taken.items(), key=lambda item: item[0])


class TurnOwner(Protocol):
    def turn_done(self, turn: Turn) -> None:
        """The request was released and not rescheduled."""

    def reschedule(self, turn: Turn, request: QueuedRequest) -> None:
        """Takes the request back. Raises TritonError INVALID_ARG; the request then stays with the backend."""


class Turn:
    """A request of a sequence while it is out of its queue: what its release means for the sequence.

    is_tracked: whether the slot waits for the release
    was_handed_out: whether an instance got the request
    """

    def __init__(self, owner: TurnOwner, sequence: Sequence, is_tracked: bool) -> None:
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
    """The sequence batcher, as its SequenceBatches use it."""

    def locked(self) -> AbstractContextManager[None]:
        """The batcher's lock."""

    def after_unlock(self, action: Callable[[], None]) -> None:
        """Calls `action` after the lock is released. The caller holds the lock."""

    def take(self, sequence: Sequence, is_tracked: bool) -> QueuedRequest:
        """Takes the next request of the sequence out of its queue. With is_tracked the slot waits for its release; else
        the caller calls `free_if_over`. The caller holds the lock."""

    def hand_out(self, sequence: Sequence, request: QueuedRequest) -> None:
        """Adds control inputs and states to a request that an instance is about to get."""

    def free_if_over(self, sequence: Sequence) -> None:
        """Gives the slot of a sequence, if that is over, to the next one. The caller holds the lock."""

    def admit(self, batch: SequenceBatch) -> None:
        """From now on sequences may get slots of the batch."""

    def retire(self, batch: SequenceBatch) -> bool:
        """No further sequence gets a slot of the batch, which is stopped when those that have one are over. Returns
        whether there are any."""


class SequenceBatch(ABC):
    """The slots of one instance, and the BatchSource of its thread. Holds sequences from `admit` on; after `dismiss` it
    keeps those that it has to their end. Batches are taken by one thread."""

    def __init__(self, slot_count: int, owner: SequenceBatchOwner) -> None:
        self.slots = Slots(slot_count)
        self._owner = owner

    def admit(self) -> None:
        self._owner.admit(self)

    def dismiss(self, thread: Thread) -> bool:
        return self._owner.retire(self)

    @abstractmethod
    def feed(self, sequence: Sequence) -> None:
        """The sequence got a request or a slot, or its last request was released. Holds the batcher's lock."""

    @abstractmethod
    def next_batch(self) -> list[QueuedRequest] | None:
        """Blocks until there is a batch for the instance; None when there will be no more."""

    @abstractmethod
    def wait_for_batch(self) -> bool:
        """Blocks until `take_batch` would have one; False when there will be none."""

    @abstractmethod
    def take_batch(self) -> list[QueuedRequest]:
        """The batch that is ready now; empty when there is none (any more)."""

    @abstractmethod
    def stop(self) -> None:
        """No further request will come. Holds the batcher's lock."""
