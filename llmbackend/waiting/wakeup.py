"""Wakeup: how any thread wakes one that blocks in a poll."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Final

_CLOSED: Final = -1


class Wakeup:
    """A level-triggered flag with a file descriptor.

    What a caller did before `set()` is seen by the loop after the `clear()` that follows; calls between two clears cost
    one system call together.
    """

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_pending = False
        self._lock = threading.RLock()
        """Of closing: a later write could reach another file with the same descriptor. Reentrant: a finalizer that runs
        within `set` may call it."""

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        """Any thread. Does nothing after close()."""
        if not self._is_pending:
            self._is_pending = True  # before the write: set after it, the flag could outlive a `clear` that read it
            with self._lock:
                if self._fd != _CLOSED:
                    os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Resets the flag. Look for work after this call, not before it."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._is_pending = False

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._fd != _CLOSED:
                os.close(self._fd)
                self._fd = _CLOSED
