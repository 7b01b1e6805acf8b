"""`pb_utils.Logger`: a model's log lines in the host's log, at the place in the model that wrote them.

For: model code. Does not know: where logs go. Invariant: the host's log levels decide what is shown. Source: Triton's
Logger, which takes no level but its own.
"""

from __future__ import annotations

import enum
import logging
import sys
from typing import ClassVar

from .arguments import text
from .host_link import host

_CALLER_OF_CALLER = 2


class Logger:
    class LogLevel(enum.Enum):
        INFO = logging.INFO
        WARNING = logging.WARNING
        ERROR = logging.ERROR
        VERBOSE = logging.DEBUG

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    @staticmethod
    def log(message: str | bytes, level: LogLevel = LogLevel.INFO) -> None:
        if not isinstance(level, Logger.LogLevel):
            raise TypeError(f"level must be one of Logger's levels, got {type(level).__name__}")
        _post(message, level)

    @staticmethod
    def log_info(message: str | bytes) -> None:
        _post(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str | bytes) -> None:
        _post(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str | bytes) -> None:
        _post(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str | bytes) -> None:
        _post(message, Logger.VERBOSE)


def _post(message: str | bytes, level: Logger.LogLevel) -> None:
    line = text(message, "message")
    caller = sys._getframe(_CALLER_OF_CALLER)
    host("Logger").post(("log", level.value, caller.f_code.co_filename, caller.f_lineno, line))
