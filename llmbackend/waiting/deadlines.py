"""Items and the times at which something is due for them.

For: the priority queue (requests whose time in the queue ends) and the timer. Does not know: what an item is, clocks.
Invariants: adding, discarding and looking up the earliest are O(log n) amortised; a discarded item is not referenced
any more, so that nothing here keeps a request alive that has left.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)

_SLACK = 64
"""Discarded entries that may stay in the heap beyond the number of live ones."""


class Deadlines(Generic[Item]):
    """Not locked: its owner's lock guards it."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, list[Item]]] = []
        self._cells: dict[Item, list[Item]] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, item: Item, due_ns: int) -> None:
        """Adds `item`, or moves it to another time."""
        self.discard(item)
        cell = [item]  # emptied when the item goes: the heap then holds no reference to it
        self._cells[item] = cell
        heapq.heappush(self._heap, (due_ns, next(self._order), cell))

    def discard(self, item: Item) -> None:
        cell = self._cells.pop(item, None)
        if cell is not None:
            cell.clear()
            self._compact()

    def earliest_ns(self) -> int | None:
        while self._heap and not self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ns: int) -> list[Item]:
        """Takes out what is due at `now_ns`, the earliest first."""
        due = []
        while (earliest_ns := self.earliest_ns()) is not None and earliest_ns <= now_ns:
            (item,) = heapq.heappop(self._heap)[2]
            del self._cells[item]
            due.append(item)
        return due

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._cells) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[2]]
            heapq.heapify(self._heap)
