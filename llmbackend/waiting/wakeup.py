"""Wakeup: wakes a thread that blocks in a poll."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

_CLOSED: Final = -1


class Wakeup:
    """A level-triggered flag with a file descriptor. Work done before `set()` is visible after the next `clear()`; any
    number of `set()` calls between two clears cost one system call."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_pending = False
        self._lock = threading.RLock()
        """Prevents a write after closing from going to another file with the same descriptor. Reentrant: a finalizer
        within `set` may call `set`."""

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        """Thread-safe. Does nothing after close()."""
        if not self._is_pending:
            self._is_pending = True  # before the write: otherwise the flag could stay set after a `clear`
            with self._lock:
                if self._fd != _CLOSED:
                    os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Resets the flag. Look for work after this call, not before."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._is_pending = False

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._fd != _CLOSED:
                os.close(self._fd)
                self._fd = _CLOSED
