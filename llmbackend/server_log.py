"""The log of a server process: where it goes, what is let through, and the settings that change while it runs.

For: the command line, which installs it before anything logs, and the frontends' logging endpoints. Does not know: what
is logged. Invariants: one record is one line; errors of one cause are logged once a minute; a change takes effect with
the next record; a log that was never installed changes nothing of the process's logging.
Source: Triton's logging extension and its --log-* flags.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from dataclasses import dataclass, replace
from typing import Any, Literal

from .log_format import LogFormat, TritonFormatter
from .log_repeats import RepeatFilter, Repeats, cause_of

_PACKAGE = "llmbackend"


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Which levels are logged, and how a line looks. verbose > 0 adds debug lines. file "" = stderr."""

    verbose: int = 0
    info: bool = True
    warning: bool = True
    error: bool = True
    format: LogFormat = "default"
    file: str = ""


class _Bounded(logging.Handler):
    """A log that can not be written says so in one line now and then, and not in a traceback for each record."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._failures = Repeats()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is None or (left_out := self._failures.take(cause_of(error))) is None:
            return
        since = f" ({left_out} more lines since this was last said)" if left_out else ""
        with contextlib.suppress(OSError, ValueError):
            print(f"a line of the log can not be written: {error}{since}", file=sys.stderr, flush=True)


class _File(_Bounded, logging.FileHandler):
    pass


class _Stream(_Bounded, logging.StreamHandler[Any]):
    """Writes where sys.stderr goes at that moment: above the bars of a load, while there are some."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, _stream: Any) -> None:
        """What StreamHandler sets when it is made is of no use."""


LogField = Literal["verbose", "info", "warning", "error", "format"]


class ServerLog:
    """Any thread may use it."""

    def __init__(self, settings: LogSettings | None = None) -> None:
        self._settings = settings or LogSettings()
        self._lock = threading.Lock()
        self._handler: logging.Handler | None = None

    @property
    def settings(self) -> LogSettings:
        return self._settings

    def install(self) -> None:
        """Sends the package's log to its file or stderr; other libraries only from WARNING on. Raises OSError when the
        file can not be written."""
        file = self._settings.file
        self._handler = _File(file, "a", "utf-8") if file else _Stream()
        self._handler.addFilter(lambda record: self._lets_through(record.levelno))
        self._handler.addFilter(RepeatFilter(Repeats()))
        self._apply()
        logging.root.handlers[:] = [self._handler]
        logging.root.setLevel(logging.WARNING)

    def update(self, **changes: Any) -> None:
        """New values of fields of LogSettings but `file`."""
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
