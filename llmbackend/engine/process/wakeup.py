"""A wake-up call for a thread that blocks in a poll.

For: the LLM manager's loop. Invariant: what a caller did before `set()` is seen by the loop after the `clear()` that
follows; calls between two clears cost one system call together.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket


def wait_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Whether `descriptor` became readable in time; None waits for ever. Takes any number, which select() does not."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1e3)))


class Wakeup:
    """A level-triggered flag with a file descriptor."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._pending = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def set(self) -> None:
        """Any thread. Does nothing after close()."""
        if not self._pending:
            self._pending = True
            with contextlib.suppress(OSError):
                self._writer.send(b"\0")

    def wait(self, timeout_s: float) -> None:
        """Blocks until set() was called, or `timeout_s` is over."""
        wait_readable(self._reader.fileno(), timeout_s)

    def clear(self) -> None:
        """Takes the flag back. Look for work after this call, not before it."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)
        self._pending = False

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
