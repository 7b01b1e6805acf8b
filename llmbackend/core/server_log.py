"""The log of a server process: Triton's line formats, adjustable levels, suppression of repeated errors.

One record is one line, except for tables; errors with the same cause are logged once a minute. Locks are reentrant:
while one is held, a garbage collection may call a finalizer that logs.
Source: Triton's logging extension, its --log-* flags and `--log-format`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from logging.handlers import WatchedFileHandler
from typing import Any, Final, Literal

MAX_LINES: Final = 300
MAX_LINE_CHARACTERS: Final = 2000
_FORMATTER: Final = logging.Formatter()


@dataclass(frozen=True, slots=True)
class LogLine:
    """One record of the log.

    time: Unix seconds
    level: DEBUG, INFO, WARNING, ERROR or CRITICAL
    text: the message and, in further lines, its traceback; at most MAX_LINE_CHARACTERS
    """

    time: float
    level: str
    text: str


Follower = Callable[[LogLine], None]


class RecentLog:
    """The most recent log lines. Thread-safe. Followers are called on the logging thread: they must only enqueue."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._followers: tuple[Follower, ...] = ()

    def add(self, record: logging.LogRecord) -> bool:
        """A logging filter that runs after those that drop records; passes all records."""
        try:
            text = _FORMATTER.format(record)[:MAX_LINE_CHARACTERS]
        except Exception:  # wrong arguments, which the handler reports; the caller must not fail
            return True
        line = LogLine(record.created, record.levelname, text.encode("utf-8", "replace").decode())
        with self._lock:
            self._lines.append(line)
            followers = self._followers
        for follower in followers:
            follower(line)
        return True

    def lines(self) -> list[LogLine]:
        """Oldest first."""
        with self._lock:
            return list(self._lines)

    def follow(self, follower: Follower) -> None:
        """Calls `follower` with each further line."""
        with self._lock:
            self._followers += (follower,)


LogFormat = Literal["default", "ISO8601"]
LogField = Literal["verbose", "info", "warning", "error", "format"]
LOG_FORMATS: tuple[LogFormat, ...] = ("default", "ISO8601")
_PACKAGE = "llmbackend"

_LETTERS = {logging.DEBUG: "V", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
IS_TABLE = "is_table"
"""`extra` of a record with several lines, which is not escaped, as in Triton."""
_ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"
"""0 or false: messages are not written as JSON strings."""
REPEAT_INTERVAL_S: Final = 60.0
_MAX_CAUSES: Final = 256
CAUSE: Final = "cause"
"""`extra` of an error record without `exc_info`: a hashable value, equal for the same cause."""


class TritonFormatter(logging.Formatter):
    """`default`: `I1121 02:03:04.000123 1234 file.py:56] "text"`; `ISO8601`: begins with the time in that format."""

    def __init__(self, style: LogFormat) -> None:
        super().__init__()
        self._iso = style == "ISO8601"
        self._escape = os.environ.get(_ESCAPE_VARIABLE, "1").lower() not in ("0", "false")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        is_text = self._escape and not getattr(record, IS_TABLE, False)
        return f"{self._head(record)}] {json.dumps(text, ensure_ascii=False) if is_text else text}"

    def _head(self, record: logging.LogRecord) -> str:
        letter = _LETTERS.get(record.levelno, "I")
        where = f"{record.process} {record.filename}:{record.lineno}"
        if self._iso:
            return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(record.created))} {letter} {where}"
        stamp = time.strftime("%m%d %H:%M:%S", time.gmtime(record.created))
        return f"{letter}{stamp}.{int(record.created % 1 * 1e6):06d} {where}"


class RepeatedErrors:
    """Counts errors by cause, of which one per REPEAT_INTERVAL_S is to be logged. Bounded. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._seen: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def take(self, cause: Hashable) -> int | None:
        """How many errors with this cause were suppressed since the last one logged; None = suppress this one."""
        now_s = self._clock()
        with self._lock:
            logged_s, left_out = self._seen.get(cause, (-REPEAT_INTERVAL_S, 0))
            if now_s - logged_s < REPEAT_INTERVAL_S:
                self._seen[cause] = (logged_s, left_out + 1)
                return None
            self._seen[cause] = (now_s, 0)
            self._seen.move_to_end(cause)
            if len(self._seen) > _MAX_CAUSES:
                self._seen.popitem(last=False)
            return left_out


class RepeatFilter(logging.Filter):
    """Drops repeated errors: with a full disk, for example, every request fails in the same way."""

    def __init__(self, repeats: RepeatedErrors) -> None:
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
            record.msg = f"{record.msg} ({left_out} more since this was last logged)"
        return left_out is not None


def cause_of(error: BaseException) -> Hashable:
    """The error's type and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = None if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return type(error).__name__, getattr(error, "errno", None), place


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Which levels are logged, and how. verbose: > 0 = also debug lines. file: path; "" = stderr."""

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: LogFormat = "default"
    file: str = ""


class _BoundedHandler(logging.Handler):
    """For records that cannot be written, prints one line a minute instead of a traceback for each."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._failures = RepeatedErrors()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is None or (left_out := self._failures.take(cause_of(error))) is None:
            return
        since = f" ({left_out} more lines since the last report)" if left_out else ""
        with contextlib.suppress(OSError, ValueError):
            print(f"a log line cannot be written: {error}{since}", file=sys.stderr, flush=True)


class _FileHandler(_BoundedHandler, WatchedFileHandler):
    """Opens the file again if it has been moved or removed, as logrotate does."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it cannot be opened again
            self.handleError(record)


class _StreamHandler(_BoundedHandler, logging.StreamHandler[Any]):
    """Writes to the current sys.stderr, which is replaced while progress bars are shown."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _stream: Any) -> None:
        """Ignored: StreamHandler.__init__ sets it."""


class ServerLog:
    """Thread-safe. The process's logging is unchanged until `install`."""

    def __init__(self, settings: LogSettings | None = None) -> None:
        self.recent = RecentLog()
        self._settings = settings or LogSettings()
        self._lock = threading.Lock()
        self._handler: logging.Handler | None = None

    @property
    def settings(self) -> LogSettings:
        return self._settings

    def install(self) -> None:
        """Writes this package's log records, and those of other libraries from WARNING on, to the file or stderr.
        Raises OSError if the file cannot be written."""
        file = self._settings.file
        self._handler = _FileHandler(file, "a", "utf-8") if file else _StreamHandler()
        self._handler.addFilter(lambda record: self._lets_through(record.levelno))
        self._handler.addFilter(RepeatFilter(RepeatedErrors()))
        self._handler.addFilter(self.recent.add)
        self._apply()
        logging.root.handlers[:] = [self._handler]
        logging.root.setLevel(logging.WARNING)

    def update(self, **changes: Any) -> None:
        """Changes fields of LogSettings (except `file`)."""
        with self._lock:
            self._settings = replace(self._settings, **changes)
            self._apply()

    def _apply(self) -> None:
        if self._handler is None:
            return
        self._handler.setFormatter(TritonFormatter(self._settings.format))
        logging.getLogger(_PACKAGE).setLevel(logging.DEBUG if self._settings.verbose else logging.INFO)

    def _lets_through(self, level: int) -> bool:
        settings = self._settings
        if level >= logging.ERROR:
            return settings.error
        if level >= logging.WARNING:
            return settings.warning
        if level >= logging.INFO:
            return settings.info
        return settings.verbose > 0
