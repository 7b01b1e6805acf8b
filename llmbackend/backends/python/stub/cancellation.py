"""Which requests their clients no longer want.

For: requests and response senders, which ask; the link to the host, which tells. Does not know: requests. Invariants: a
cancellation that overtakes its request, which comes through another socket, is kept for it; one that comes after the
request's end is forgotten, because numbers only grow. No locks: each step is one operation on a set, and `request`
looks again after it has added, so that an end in between leaves nothing behind.
"""

from __future__ import annotations


class Cancellations:
    """Any thread may use it; `begin` comes from one, with growing numbers."""

    def __init__(self) -> None:
        self._live: set[int] = set()
        self._requested: set[int] = set()
        self._newest = -1

    def begin(self, number: int) -> None:
        self._live.add(number)
        self._newest = number

    def is_requested(self, number: int) -> bool:
        return number in self._requested

    def end(self, number: int) -> bool:
        """Whether its cancellation was asked for."""
        self._live.discard(number)
        is_requested = number in self._requested
        self._requested.discard(number)
        return is_requested

    def request(self, number: int) -> None:
        self._requested.add(number)
        if number <= self._newest and number not in self._live:
            self._requested.discard(number)
