"""Alarms at given times, run by a thread that sleeps until the earliest one; and items ordered by deadline."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

Item = TypeVar("Item", bound=Hashable)
Alarm = Callable[[], None]
MAX_SLEEP_S = 3600.0
"""A configuration may specify centuries, which a lock's timeout cannot express."""

_SLACK = 64
"""Maximum number of discarded entries in the heap, beyond twice the number of items."""


class Deadlines(Generic[Item]):
    """Items by deadline. Operations are O(log n) amortised. Discarded items are not referenced, so no request is kept
    alive. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, list[Item]]] = []
        self._cells: dict[Item, list[Item]] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, item: Item, due_ns: int) -> None:
        """Adds `item`, or changes its time."""
        self.discard(item)
        cell = [item]  # cleared when the item is discarded
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
        """Removes and returns the items due at `now_ns`, earliest first."""
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


class Timer:
    """Runs alarms between `start` and `stop`, outside its lock; they must be short. Each alarm has one time. Without
    alarms the thread sleeps without a timeout, so that an idle server uses no CPU. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._alarms: Deadlines[Alarm] = Deadlines()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> None:
        with self._changed:
            if self._thread is None:
                self._stopped = False
                thread = threading.Thread(target=self._run, name="timer", daemon=True)
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        """Ends the thread. Alarms that have not begun never run."""
        with self._changed:
            thread, self._stopped = self._thread, True
            self._changed.notify_all()
        if thread is not None:
            thread.join()
            with self._changed:
                self._thread = None

    def __len__(self) -> int:
        with self._changed:
            return len(self._alarms)

    def set(self, alarm: Alarm, due_ns: int) -> None:
        """Runs `alarm` at `due_ns` (monotonic); replaces its earlier time."""
        with self._changed:
            earliest_ns = self._alarms.earliest_ns()
            self._alarms.add(alarm, due_ns)
            if earliest_ns is None or due_ns < earliest_ns:
                self._changed.notify()

    def clear(self, alarm: Alarm) -> None:
        with self._changed:
            self._alarms.discard(alarm)

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            for alarm in due:
                try:
                    alarm()
                except Exception:
                    log.exception("an alarm failed")
            del due, alarm  # otherwise they would keep a queue alive until the next alarm

    def _wait(self) -> list[Alarm] | None:
        """Sleeps until an alarm is due. Returns None if stopped."""
        with self._changed:
            while not self._stopped:
                now_ns = time.monotonic_ns()
                if due := self._alarms.pop_due(now_ns):
                    return due
                earliest_ns = self._alarms.earliest_ns()
                sleep_s = None if earliest_ns is None else min((earliest_ns - now_ns) / 1e9, MAX_SLEEP_S)
                self._changed.wait(sleep_s)
            return None
