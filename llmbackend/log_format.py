"""Log lines as Triton writes them, so that tools which read Triton's logs read ours.

For: the command line, once, before anything logs. Does not know: what is logged. Invariant: one record is one line on
stderr. Source: Triton's `--log-format` (`default`: `I1121 02:03:04.000123 1234 file.py:56] text`; `ISO8601`).
"""

from __future__ import annotations

import logging
import sys
import time

from .settings import LogSettings

_LETTERS = {logging.DEBUG: "V", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}


class TritonFormatter(logging.Formatter):
    """Formats a record in one of Triton's two styles."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self._iso = style == "ISO8601"

    def format(self, record: logging.LogRecord) -> str:
        letter = _LETTERS.get(record.levelno, "I")
        text = super().format(record)
        if self._iso:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
            return f"{stamp} {letter} {record.process} {record.filename}:{record.lineno}] {text}"
        stamp = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        microseconds = int(record.created % 1 * 1e6)
        return f"{letter}{stamp}.{microseconds:06d} {record.process} {record.filename}:{record.lineno}] {text}"


def configure_logging(settings: LogSettings) -> None:
    """Sends the package's log to stderr; other libraries only from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TritonFormatter(settings.format))
    handler.addFilter(lambda record: _wanted(record.levelno, settings))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("llmbackend").setLevel(logging.DEBUG if settings.verbose else logging.INFO)


def _wanted(level: int, settings: LogSettings) -> bool:
    if level >= logging.ERROR:
        return settings.error
    if level >= logging.WARNING:
        return settings.warning
    if level >= logging.INFO:
        return settings.info
    return settings.verbose > 0
