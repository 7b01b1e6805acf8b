"""A sequence of requests that share a correlation id, and the numbered slots of an instance that sequences run in.

For: SequenceTable and the strategies (SequenceDirect, SequenceOldest). Does not know: clients' ids, clocks, threads.
Invariants: a sequence has at most one slot; a slot is made when it is first needed, so that a configuration that asks
for a million candidate sequences costs nothing; the lowest free number is given out first, so that batches stay small.
Not locked: the batcher's lock guards both. Source: Triton's SequenceBatch and BatcherSequenceSlot.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmbackend.core.requests.infer_request import InferRequest

if TYPE_CHECKING:
    from .sequence_lane import SequenceLane
    from .sequence_state import SequenceStates

SequenceKey = int | str | tuple[str, int] | tuple[str, str, int | str]
"""A client's correlation id, or one of the host's own, which can not be taken for a client's."""


@dataclass(eq=False, slots=True)
class Sequence:
    """`waiting` holds the requests that no instance has. `lane` is None in the backlog. After `is_ended` no request
    joins. `running` counts the requests whose release the slot waits for. `patience_ns` is when a sequence of the
    backlog gives up, 0 = never."""

    key: SequenceKey
    waiting: deque[InferRequest] = field(default_factory=deque)
    lane: SequenceLane | None = None
    slot: int = -1
    is_ended: bool = False
    running: int = 0
    patience_ns: int = 0
    states: SequenceStates | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left to be done."""
        return self.is_ended and not self.waiting and not self.running


class Slots:
    """The slots of one instance."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken: dict[int, Sequence] = {}
        self._freed: list[int] = []
        self._unused = 0  # from here on, no slot was ever taken

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
        """What is taken, by number."""
        return sorted(self._taken.items(), key=lambda item: item[0])
