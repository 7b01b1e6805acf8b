"""What the sequence batcher has for each instance, whatever the strategy: its slots, and a way to its thread.

For: SequenceBatcher (it says what there is to do) and the instance's thread (whose BatchSource it is). Does not know:
how a strategy makes batches of what its slots hold. Invariants: `feed` and `stop` are called with the batcher's lock
held; batches are taken by one thread. A lane holds sequences from `admit` on; one that is dismissed keeps those that it
has to their end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Thread
from typing import Protocol

from llmbackend.core.requests.infer_request import InferRequest

from .sequence import Sequence, Slots


class LaneOwner(Protocol):
    """The sequence batcher as its lanes see it."""

    def locked(self) -> AbstractContextManager[None]:
        """The batcher's lock."""

    def later(self, action: Callable[[], None]) -> None:
        """Does it after the lock was given back. The caller holds the lock."""

    def take(self, sequence: Sequence, is_tracked: bool) -> InferRequest:
        """The next request of the sequence, out of its queue; with `is_tracked` the slot waits for its release
        (else the caller `settle`s the sequence). The caller holds the lock."""

    def hand_out(self, sequence: Sequence, request: InferRequest) -> None:
        """Gives the request its control inputs and states, right before an instance gets it."""

    def settle(self, sequence: Sequence) -> None:
        """Gives the slot of a sequence that is over to the next one. The caller holds the lock."""

    def admit(self, lane: SequenceLane) -> None:
        """Sequences may be given slots of the lane."""

    def retire(self, lane: SequenceLane) -> bool:
        """No more sequence gets a slot of the lane, which is stopped when those that have one are over; whether there
        are any."""


class SequenceLane(ABC):
    def __init__(self, slot_count: int, owner: LaneOwner) -> None:
        self.slots = Slots(slot_count)
        self._owner = owner

    def admit(self) -> None:
        self._owner.admit(self)

    def dismiss(self, thread: Thread) -> bool:
        return self._owner.retire(self)

    @abstractmethod
    def feed(self, sequence: Sequence) -> None:
        """The sequence got a request, or a slot of this lane, or its last request was released."""

    @abstractmethod
    def next_batch(self) -> list[InferRequest] | None:
        """Blocks until there is a batch for the instance; None when it will get no more."""

    @abstractmethod
    def wait_for_batch(self) -> bool:
        """Blocks until `take_batch` would have one; False when there will be none."""

    @abstractmethod
    def take_batch(self) -> list[InferRequest]:
        """The batch that is ready now; empty when there is none (any more)."""

    @abstractmethod
    def stop(self) -> None:
        """No request will come any more."""
