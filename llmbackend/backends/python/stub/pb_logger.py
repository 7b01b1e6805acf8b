"""`pb_utils.Logger`: a model's log lines in the host's log, at the place in the model that wrote them.

For: model code. Does not know: where logs go. Invariant: the host's log levels decide what is shown.
"""

from __future__ import annotations

import logging
import sys
from typing import ClassVar

from .host_link import host

_CALLER_OF_CALLER = 2


class Logger:
    INFO: ClassVar[int] = logging.INFO
    WARNING: ClassVar[int] = logging.WARNING
    ERROR: ClassVar[int] = logging.ERROR
    VERBOSE: ClassVar[int] = logging.DEBUG

    @staticmethod
    def log(message: str, level: int = logging.INFO) -> None:
        _post(message, level)

    @staticmethod
    def log_info(message: str) -> None:
        _post(message, logging.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        _post(message, logging.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        _post(message, logging.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        _post(message, logging.DEBUG)


def _post(message: str, level: int) -> None:
    caller = sys._getframe(_CALLER_OF_CALLER)
    host("Logger").post(("log", int(level), caller.f_code.co_filename, caller.f_lineno, str(message)))
