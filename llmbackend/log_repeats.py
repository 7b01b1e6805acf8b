"""Errors that come once per request are logged once per minute and cause.

For: the server's log. Does not know: what is logged. Invariants: the first error of a cause is always logged, and the
next one that is says how many were not; records without an error are never left out; what is remembered is bounded.
Why: a full disk or a lack of memory fails every request in the same way, and each with a traceback.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

EVERY_S: Final = 60.0
_MAX_CAUSES: Final = 256
CAUSE: Final = "cause"
"""What a record of an error without `exc_info` is marked with (`extra`): the same hashable for the same cause."""


class Repeats:
    """Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def take(self, cause: Hashable) -> int | None:
        """None while this cause is not to be told again; otherwise how many of it have not been told since the last."""
        now_s = self._clock()
        with self._lock:
            told_s, left_out = self._seen.get(cause, (-EVERY_S, 0))
            if now_s - told_s < EVERY_S:
                self._seen[cause] = (told_s, left_out + 1)
                return None
            self._seen[cause] = (now_s, 0)
            self._seen.move_to_end(cause)
            if len(self._seen) > _MAX_CAUSES:
                self._seen.popitem(last=False)
            return left_out


class RepeatFilter(logging.Filter):
    def __init__(self, repeats: Repeats) -> None:
        super().__init__()
        self._repeats = repeats

    def filter(self, record: logging.LogRecord) -> bool:
        cause = getattr(record, CAUSE, None)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            cause = cause_of(error)
        if cause is None:
            return True
        left_out = self._repeats.take((record.name, record.lineno, cause))
        if left_out:
            record.msg = f"{record.getMessage()} ({left_out} more since this was last logged)"
            record.args = ()
        return left_out is not None


def cause_of(error: BaseException) -> Hashable:
    """The kind of an error and the place that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return type(error).__name__, getattr(error, "errno", None), place
