"""A queue with priority levels, for the requests of the host and of the adapter."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

Item = TypeVar("Item")
Lane = tuple[int, bool]
"""A priority level, and whether the items in this lane are delayed."""


class LevelQueue(Generic[Item]):
    """Lower levels come first; within a level the order is that of arrival, with delayed items last. A lane exists
    while it contains items. Operations on one item are O(1). Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, OrderedDict[Item, None]] = {}
        """OrderedDict, because a dict is slow at finding its first entry after deletions."""
        self._order: list[Lane] = []
        self._lane_of: dict[Item, Lane] = {}

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, item: Item) -> bool:
        return item in self._lane_of

    def __iter__(self) -> Iterator[Item]:
        """In serving order."""
        for lane in self._order:
            yield from self._lanes[lane]

    def num_in_level(self, level: int) -> int:
        return sum(len(self._lanes.get((level, is_delayed), ())) for is_delayed in (False, True))

    def append(self, item: Item, level: int, is_delayed: bool = False) -> None:
        lane = level, is_delayed
        if lane not in self._lanes:
            self._lanes[lane] = OrderedDict()
            bisect.insort(self._order, lane)
        self._lanes[lane][item] = None
        self._lane_of[item] = lane

    def put_back(self, item: Item, level: int, is_delayed: bool = False) -> None:
        """Inserts it before all other items of its lane."""
        self.append(item, level, is_delayed)
        self._lanes[level, is_delayed].move_to_end(item, last=False)

    def first(self, count: int) -> Iterator[Item]:
        """The first `count` items in order. Items already yielded may be removed during iteration."""
        for lane in tuple(self._order):
            some = list(islice(self._lanes[lane], count))
            yield from some
            count -= len(some)
            if not count:
                return

    def pop_first(self) -> Item:
        """Raises IndexError if the queue is empty."""
        item = next(iter(self._lanes[self._order[0]]))
        self.remove(item)
        return item

    def remove(self, item: Item) -> bool:
        """Returns whether it was queued."""
        lane = self._lane_of.pop(item, None)
        if lane is None:
            return False
        del self._lanes[lane][item]
        if not self._lanes[lane]:
            del self._lanes[lane]
            del self._order[bisect.bisect_left(self._order, lane)]
        return True

    def delay(self, item: Item) -> bool:
        """Moves an item behind all others of its level. Returns whether it was queued."""
        lane = self._lane_of.get(item)
        if lane is None:
            return False
        self.remove(item)
        self.append(item, lane[0], is_delayed=True)
        return True
