"""The adapter's log lines in Triton's log.

For: TritonPythonModel. Invariant: with one handler per process; a line that cannot be written is lost, and harms
nobody.
"""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils

NAME = "llmbackend"


class TritonLogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.levelno >= logging.ERROR:
                pb_utils.Logger.log_error(text)
            elif record.levelno >= logging.WARNING:
                pb_utils.Logger.log_warn(text)
            elif record.levelno >= logging.INFO:
                pb_utils.Logger.log_info(text)
            else:
                pb_utils.Logger.log_verbose(text)
        except Exception:
            self.handleError(record)


def attach() -> logging.Handler:
    """Every line of INFO and above of this package goes to Triton's log, until `detach`."""
    handler = TritonLogHandler()
    ours = logging.getLogger(NAME)
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
    return handler


def detach(handler: logging.Handler) -> None:
    logging.getLogger(NAME).removeHandler(handler)
