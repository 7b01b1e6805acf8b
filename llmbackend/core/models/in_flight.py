"""An explicit count of open handles, and a way to wait until there are none.

For: draining a model before it is finalised, and a server before it stops. Does not know: what a handle is.
Invariant: the count never falls below zero; nothing relies on the garbage collector.
"""

from __future__ import annotations

import threading


class InFlight:
    """Counts handles; any thread may enter, leave or wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._count = 0
        self._entered = 0

    @property
    def count(self) -> int:
        return self._count

    def enter(self) -> None:
        with self._changed:
            self._count += 1
            self._entered += 1

    def leave(self) -> int | None:
        """When this was the last open handle: how many were ever entered, for `is_idle_since`."""
        with self._changed:
            assert self._count > 0, "leave() without enter()"
            self._count -= 1
            if self._count:
                return None
            self._changed.notify_all()
            return self._entered

    def is_idle_since(self, entered: int) -> bool:
        """Whether no handle was opened since `leave` returned `entered`."""
        with self._changed:
            return self._count == 0 and self._entered == entered

    def wait_for_zero(self, timeout_s: float | None = None) -> bool:
        """Blocks until no handle is open; False when `timeout_s` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._count == 0, timeout_s)
