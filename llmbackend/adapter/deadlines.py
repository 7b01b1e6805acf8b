"""Calls back when a request's time is over.

For: ModelState. Does not know: what is done then. Invariants: the thread sleeps until the earliest deadline and does
not exist while there was never one; a callback is called at most once, outside the lock, and may come for a request
that has ended; what it keeps stays in proportion to the requests that live.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

Entry = tuple[int, int, str, Callable[[str], None]]
"""(monotonic ns, a number that parts equal times, request id, what to call)"""
_FEW = 1024


class Deadlines:
    """`is_live(request_id)` tells which entries are still worth keeping. Any thread."""

    def __init__(self, is_live: Callable[[str], bool]) -> None:
        self._is_live = is_live
        self._changed = threading.Condition(threading.Lock())
        self._heap: list[Entry] = []
        self._numbers = itertools.count()
        self._most_entries = _FEW
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, at_ns: int, request_id: str, expire: Callable[[str], None]) -> None:
        """Calls `expire(request_id)` at time.monotonic_ns() == at_ns or soon after."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._heap, (at_ns, next(self._numbers), request_id, expire))
            if len(self._heap) > self._most_entries:
                self._forget_the_ended()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="llm-deadlines", daemon=True)
                self._thread.start()
            elif self._heap[0][0] == at_ns:
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread; nothing is called afterwards. Not from a callback."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _forget_the_ended(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_live(entry[2])]
        heapq.heapify(self._heap)
        self._most_entries = max(_FEW, 2 * len(self._heap))

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            request_id, expire = due
            try:
                expire(request_id)
            except Exception:
                logger.exception("the deadline of request %s could not be handled", request_id)

    def _wait(self) -> tuple[str, Callable[[str], None]] | None:
        """Blocks until an entry is due; None when closed."""
        with self._changed:
            while not self._closed:
                left_s = (self._heap[0][0] - time.monotonic_ns()) * 1e-9 if self._heap else None
                if left_s is not None and left_s <= 0:
                    _, _, request_id, expire = heapq.heappop(self._heap)
                    return request_id, expire
                self._changed.wait(None if left_s is None else min(left_s, threading.TIMEOUT_MAX))
        return None
