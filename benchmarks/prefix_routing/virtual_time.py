"""A clock that jumps from event to event.

For the comparison and the simulation. Independent of what happens. Invariant: events of one time run in the order in
which they were planned, so that a run repeats.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualTime:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    @property
    def now_ns(self) -> int:
        return int(self.now_s * 1e9) + 1

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._order), event))

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, event)

    def run(self) -> None:
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
