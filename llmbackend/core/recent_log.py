"""The latest lines of a server's log, for operators who look at it over the network.

For: ServerLog, which adds what it writes, and the feed of events. Does not know: levels that are switched off, formats,
viewers. Invariants: so many lines and characters are kept and no more; a follower gets each line once, in order; a text
is valid Unicode, whatever was logged.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_LINES: Final = 300
MAX_LINE_CHARACTERS: Final = 2000
_FORMATTER: Final = logging.Formatter()


@dataclass(frozen=True, slots=True)
class LogLine:
    """One record of the log."""

    time: float
    """Unix seconds."""
    level: str
    """DEBUG, INFO, WARNING, ERROR or CRITICAL."""
    text: str
    """The message, and the traceback where there is one; several lines then. At most MAX_LINE_CHARACTERS."""


Follower = Callable[[LogLine], None]


class RecentLog:
    """Any thread may use it. A follower is called under the lock, on the thread that logs: it must only enqueue."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._followers: list[Follower] = []

    def add(self, record: logging.LogRecord) -> bool:
        """As a filter of a handler, behind those that drop records; lets every record through."""
        text = _FORMATTER.format(record)[:MAX_LINE_CHARACTERS]
        line = LogLine(record.created, record.levelname, text.encode("utf-8", "replace").decode())
        with self._lock:
            self._lines.append(line)
            for follower in self._followers:
                follower(line)
        return True

    def lines(self) -> list[LogLine]:
        """The lines so far, the oldest first."""
        with self._lock:
            return list(self._lines)

    def follow(self, follower: Follower) -> None:
        """`follower` gets the lines that come, as long as there is a log."""
        with self._lock:
            self._followers.append(follower)
