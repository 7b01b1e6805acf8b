"""The memory that request bodies take while they arrive, shared out among clients.

For: whoever reads bodies (request_body.py); each request of the HTTP application has a lease in its scope. Does not
know: what is in a body. Invariants: what all leases hold is never more than the budget; no client holds more than what
it leaves free, so that one gets a half, two get a third each, and a new one always finds room; a lease is given back
when its request ends, at the latest. Any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from starlette.requests import Request

from llmbackend.core.errors import unavailable

from .doors.visit import VISIT

BODY_LEASE: Final = "llmbackend.body_lease"
"""Key of the scope; not there outside of this package's application."""
_LARGEST_BODIES: Final = 4
"""So many bodies of the largest size fit at least: one that is unpacked is held twice, and takes up a half."""


class BodyBudget:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: Counter[str] = Counter()
        self._held_bytes = 0
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def make_room_for(self, body_bytes: int) -> None:
        """A body of that size can be taken while there is no other one."""
        self._max_bytes = max(self._max_bytes, _LARGEST_BODIES * body_bytes)

    def take(self, owner: str, size_bytes: int) -> None:
        """Raises TritonError UNAVAILABLE when it would be too much, and then takes nothing."""
        with self._lock:
            held = self._held[owner] + size_bytes
            if size_bytes > 0 and held > self._max_bytes - self._held_bytes - size_bytes:
                raise unavailable(
                    f"the server has no room for more of this request's body: of {self._max_bytes} bytes for all that "
                    f"arrive at once, {self._held_bytes} are taken, {self._held[owner]} of them by this client"
                )
            self._held_bytes += size_bytes
            self._held[owner] = held
            if not held:
                del self._held[owner]


class BodyLease:
    """Of one request. One thread at a time."""

    __slots__ = ("_budget", "_owner", "_size_bytes")

    def __init__(self, budget: BodyBudget | None) -> None:
        """Without a budget it only counts."""
        self._budget = budget
        self._owner = ""
        self._size_bytes = 0

    @classmethod
    def of(cls, request: Request) -> BodyLease:
        """The request's, for the key that it came with, or its address."""
        lease: BodyLease = request.scope.get(BODY_LEASE) or cls(None)
        if not lease._owner:
            visit = VISIT.get()
            lease._owner = (
                f"key {visit.account.name}"
                if visit is not None
                else f"address {(request.scope.get('client') or [''])[0]}"
            )
        return lease

    def grow(self, size_bytes: int) -> None:
        """Raises TritonError UNAVAILABLE when there is no room. Negative gives some back."""
        if self._budget is not None:
            self._budget.take(self._owner, size_bytes)
            self._size_bytes += size_bytes

    def release(self) -> None:
        """Idempotent."""
        if self._size_bytes:
            self.grow(-self._size_bytes)
