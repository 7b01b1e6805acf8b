"""The log of a process that a server started, in the server's own log.

For: frontend processes and what starts them. Does not know: how a log is written (`core/server_log.py`). Invariants:
one record is one line of JSON on standard error, whatever its text; a line that is no record, such as the last words of
an interpreter, is logged as an error.
"""

from __future__ import annotations

import logging
import sys

import msgspec

log = logging.getLogger(__name__)


class LogRecordLine(msgspec.Struct, frozen=True):
    """What is kept of a record."""

    logger: str
    level: int
    created_s: float
    path: str
    line: int
    text: str


class _RecordWriter(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        text = logging.Formatter().format(record)
        kept = LogRecordLine(record.name, record.levelno, record.created, record.pathname, record.lineno, text)
        try:
            sys.stderr.buffer.write(msgspec.json.encode(kept) + b"\n")
            sys.stderr.buffer.flush()
        except (OSError, ValueError):  # the reader is gone, and this process will be soon
            return


def write_records(filters: tuple[logging.Filter, ...], is_verbose: bool) -> None:
    """From now on this process's records go to standard error: this package's, other libraries' from WARNING on."""
    handler = _RecordWriter()
    for each in filters:
        handler.addFilter(each)
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(logging.WARNING)
    logging.getLogger("llmbackend").setLevel(logging.DEBUG if is_verbose else logging.INFO)


def log_line(line: bytes, process_name: str, pid: int) -> None:
    """Logs a line that a process has written, as its own, with the process's name before the text."""
    try:
        kept = msgspec.json.decode(line, type=LogRecordLine)
    except msgspec.DecodeError:
        log.error("%s: %s", process_name, line.decode("utf-8", "replace").rstrip())
        return
    logger = logging.getLogger(kept.logger)
    if not logger.isEnabledFor(kept.level):
        return
    text = f"{process_name}: {kept.text}"
    record = logger.makeRecord(kept.logger, kept.level, kept.path, kept.line, text, (), None)
    record.created, record.process = kept.created_s, pid
    logger.handle(record)
