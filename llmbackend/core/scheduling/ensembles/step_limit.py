"""How many requests of one step of an ensemble may be under way at once, over all requests of the ensemble.

For: the ensemble scheduler (`max_inflight_requests`). Does not know: what a step does. Invariants: never more than
`most` are under way; those that wait start in the order in which they came. A backend that answers many times and
may be blocked waits in `make_room` while any of the step's requests does, so that no more than one response per such
backend's thread is kept here; what others send is bounded by the run that it is for.
Source: StepInflightRequestLimiter in Triton's ensemble_scheduler.cc, which makes every caller wait, also a frontend.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 300.0
"""A backend that waited so long goes on, lest it waits for itself (Triton's kMutexTimeoutSeconds)."""


class Startable(Protocol):
    def start(self) -> None:
        """Begins; never raises. `finished` follows, on any thread."""


class StepLimit:
    def __init__(self, most: int, subject: str) -> None:
        self._most = most
        self._subject = subject
        self._changed = threading.Condition(threading.Lock())
        self._under_way = 0
        self._waiting: OrderedDict[Startable, None] = OrderedDict()
        self._is_starting = False

    def __len__(self) -> int:
        """How many are under way or wait."""
        return self._under_way + len(self._waiting)

    def add(self, request: Startable) -> None:
        """`request` waits for a slot; `start_waiting` must follow, under no lock."""
        with self._changed:
            self._waiting[request] = None

    def finished(self) -> None:
        """One of those that were started is over; `start_waiting` must follow, under no lock."""
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def discard(self, request: Startable) -> bool:
        """Whether `request` still waited; then it will not be started."""
        with self._changed:
            if request not in self._waiting:
                return False
            del self._waiting[request]
            self._changed.notify_all()
            return True

    def make_room(self, is_pointless: Callable[[], bool]) -> None:
        """Blocks until a request could start at once, or until waiting is pointless (ask again after `wake`)."""
        with self._changed:
            if not self._changed.wait_for(lambda: is_pointless() or len(self) < self._most, LONGEST_WAIT_S):
                log.error(
                    "%s unable to schedule (inflight: %d >= limit: %d) for %d seconds. Proceeding to avoid deadlock.",
                    self._subject,
                    len(self),
                    self._most,
                    LONGEST_WAIT_S,
                )

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def start_waiting(self) -> None:
        """Starts what there are slots for. By one thread at a time: a request that is over as soon as it starts frees
        its slot from within `start`."""
        with self._changed:
            if self._is_starting:
                return
            self._is_starting = True
        while True:
            with self._changed:
                if not self._waiting or self._under_way >= self._most:
                    self._is_starting = False
                    return
                request, _ = self._waiting.popitem(last=False)
                self._under_way += 1
            request.start()
