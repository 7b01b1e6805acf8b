"""Calls back at given times, on one thread that sleeps until the earliest of them.

For: queues, whose requests must be answered when their time is over even if no instance asks for a batch. Does not
know: requests. Invariants: one pending time per alarm; an alarm runs outside of the timer's lock and must only do short
work; without alarms the thread sleeps without a timeout, so an idle server uses no CPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from .deadlines import Deadlines

log = logging.getLogger(__name__)

Alarm = Callable[[], None]
LONGEST_SLEEP_S = 3600.0
"""A lock's wait takes no timeout of centuries, which a configuration may ask for."""


class Timer:
    """Runs alarms between `start` and `stop`; any thread may set and clear them."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._alarms: Deadlines[Alarm] = Deadlines()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> None:
        if self._thread is None:
            self._stopped = False
            self._thread = threading.Thread(target=self._run, name="timer", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread; alarms that were set and not yet due never run."""
        if self._thread is not None:
            with self._changed:
                self._stopped = True
                self._changed.notify()
            self._thread.join()
            self._thread = None

    def __len__(self) -> int:
        with self._changed:
            return len(self._alarms)

    def set(self, alarm: Alarm, due_ns: int) -> None:
        """Runs `alarm` at `due_ns` (monotonic), instead of at the time it was set to before."""
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
            del due, alarm  # or the last one would keep its queue alive until the next

    def _wait(self) -> list[Alarm] | None:
        """Sleeps until something is due; None when stopped."""
        with self._changed:
            while not self._stopped:
                now_ns = time.monotonic_ns()
                if due := self._alarms.pop_due(now_ns):
                    return due
                earliest_ns = self._alarms.earliest_ns()
                sleep_s = None if earliest_ns is None else min((earliest_ns - now_ns) / 1e9, LONGEST_SLEEP_S)
                self._changed.wait(sleep_s)
            return None
