"""Which requests their clients no longer want.

For: requests and response senders, which ask; the link to the host, which tells. Does not know: requests. Invariants: a
cancellation that overtakes its request, which comes through another socket, is kept for it; one that comes after the
request's end is forgotten, because numbers only grow.
"""

from __future__ import annotations

import threading


class Cancellation:
    __slots__ = ("is_requested",)

    def __init__(self) -> None:
        self.is_requested = False


class Cancellations:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a collected request may end in the middle of it
        self._live: dict[int, Cancellation] = {}
        self._early: set[int] = set()
        self._newest = -1

    def __len__(self) -> int:
        return len(self._live) + len(self._early)

    def begin(self, number: int) -> Cancellation:
        with self._lock:
            cancellation = self._live[number] = Cancellation()
            self._newest = number
            if number in self._early:
                self._early.discard(number)
                cancellation.is_requested = True
            return cancellation

    def end(self, number: int) -> None:
        with self._lock:
            self._live.pop(number, None)

    def request(self, number: int) -> None:
        with self._lock:
            if number in self._live:
                self._live[number].is_requested = True
            elif number > self._newest:
                self._early.add(number)
