"""Log lines as Triton writes them, so that tools which read Triton's logs read ours.

For: the server's log. Does not know: what is logged. Invariant: one record is one line: the message is a JSON string,
its line ends escaped, as in Triton since 24.05 (TRITON_SERVER_ESCAPE_LOG_MESSAGES=0 turns that off, as there); only a
record that says that it is a table has several. Source: Triton's
`--log-format` (`default`: `I1121 02:03:04.000123 1234 file.py:56] "text"`; `ISO8601`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Literal

LogFormat = Literal["default", "ISO8601"]
LOG_FORMATS: tuple[LogFormat, ...] = ("default", "ISO8601")

_LETTERS = {logging.DEBUG: "V", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
IS_TABLE = "is_table"
"""What a record with lines of its own is marked with (`extra`): Triton does not escape its tables."""
_ESCAPE_VARIABLE = "TRITON_SERVER_ESCAPE_LOG_MESSAGES"


class TritonFormatter(logging.Formatter):
    """Formats a record in one of Triton's two styles."""

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
