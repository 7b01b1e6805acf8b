"""Which sequences there are: by their ids, in which slots, who waits for a slot, and until when each may be idle.

For: SequenceBatcher, which guards it with its lock. Does not know: what requests hold, threads, who answers a request.
Invariants: a sequence is open from its first request until END, idleness or a dropped request, and only an open one is
found by its id; every sequence is in one slot or in the backlog until it is over; the backlog is served in the order
in which sequences began. Source: Triton's SequenceBatchScheduler. By design different: idleness is counted from when a
sequence got its slot, not while it waits for one, so that a backlog does not end sequences as soon as they run.
"""

from __future__ import annotations

from collections import OrderedDict

from llmbackend.waiting.deadlines import Deadlines

from .sequence import Sequence, SequenceKey
from .sequence_lane import SequenceLane


class SequenceTable:
    def __init__(self, max_idle_us: int) -> None:
        self._max_idle_ns = max_idle_us * 1000
        self._open: dict[SequenceKey, Sequence] = {}
        self._lanes: list[SequenceLane] = []
        self._retired: list[SequenceLane] = []
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        self._idle: Deadlines[Sequence] = Deadlines()
        self._impatient: Deadlines[Sequence] = Deadlines()

    @property
    def open_count(self) -> int:
        return len(self._open)

    @property
    def lanes(self) -> list[SequenceLane]:
        """Those that have or may get sequences."""
        return [*self._lanes, *self._retired]

    def add_lane(self, lane: SequenceLane, now_ns: int) -> list[Sequence]:
        """The sequences of the backlog that got slots of it."""
        self._lanes.append(lane)
        return self._place_backlog(now_ns)

    def retire_lane(self, lane: SequenceLane) -> bool:
        """No more sequence gets a slot of it; whether there are any that have one."""
        if lane in self._lanes:
            self._lanes.remove(lane)
        if len(lane.slots):
            self._retired.append(lane)
        return len(lane.slots) > 0

    def drop_if_empty(self, lane: SequenceLane) -> bool:
        """Whether the lane was retired and has no sequence any more; then it is forgotten."""
        if lane not in self._retired or len(lane.slots):
            return False
        self._retired.remove(lane)
        return True

    def find(self, key: SequenceKey) -> Sequence | None:
        """The open sequence with that id."""
        return self._open.get(key)

    def begin(self, key: SequenceKey) -> Sequence:
        """A new sequence, in the lowest free slot of all lanes, else at the end of the backlog."""
        sequence = Sequence(key)
        self._open[key] = sequence
        if not self._place(sequence):
            self._backlog[sequence] = None
        return sequence

    def touch(self, sequence: Sequence, now_ns: int, timeout_us: int) -> None:
        """A request came: it is not idle. In the backlog the shortest timeout of its requests counts."""
        if sequence.lane is not None:
            self._idle.add(sequence, now_ns + self._max_idle_ns)
        elif timeout_us > 0:
            due_ns = now_ns + timeout_us * 1000
            sequence.patience_ns = min(sequence.patience_ns or due_ns, due_ns)
            self._impatient.add(sequence, sequence.patience_ns)

    def end(self, sequence: Sequence) -> None:
        """No request joins it any more."""
        sequence.is_ended = True
        self._idle.discard(sequence)
        if self._open.get(sequence.key) is sequence:
            del self._open[sequence.key]

    def remove(self, sequence: Sequence, now_ns: int) -> list[Sequence]:
        """Takes out a sequence that is over. The sequences that got a slot by that."""
        self._impatient.discard(sequence)
        lane = sequence.lane
        if lane is None:
            self._backlog.pop(sequence, None)
            return []
        lane.slots.free(sequence)
        sequence.lane = None
        return self._place_backlog(now_ns)

    def take_idle(self, now_ns: int) -> list[Sequence]:
        """Sequences that were idle for too long; each is ended by the caller."""
        return self._idle.pop_due(now_ns)

    def take_impatient(self, now_ns: int) -> list[Sequence]:
        """Sequences that waited for a slot for too long; each is ended by the caller."""
        return self._impatient.pop_due(now_ns)

    def next_due_ns(self) -> int | None:
        due = [due for due in (self._idle.earliest_ns(), self._impatient.earliest_ns()) if due is not None]
        return min(due, default=None)

    def clear(self) -> None:
        for sequence in list(self._open.values()):
            self.end(sequence)

    def _place_backlog(self, now_ns: int) -> list[Sequence]:
        placed = []
        while self._backlog and self._place(first := next(iter(self._backlog))):
            del self._backlog[first]
            self._impatient.discard(first)
            if not first.is_ended:
                self._idle.add(first, now_ns + self._max_idle_ns)
            placed.append(first)
        return placed

    def _place(self, sequence: Sequence) -> bool:
        best: tuple[int, SequenceLane] | None = None
        for lane in self._lanes:
            number = lane.slots.lowest_free()
            if number is not None and (best is None or number < best[0]):
                best = (number, lane)
        if best is None:
            return False
        sequence.lane = best[1]
        sequence.lane.slots.take(sequence)
        return True
