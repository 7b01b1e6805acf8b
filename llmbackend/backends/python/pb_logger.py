"""`pb_utils.Logger`: a model's log lines in the host's log, at the place in the model that wrote them.

For: model code. Does not know: where logs go. Invariant: the host's log levels decide what is shown.
"""

from __future__ import annotations

import logging
from typing import ClassVar

_log = logging.getLogger("llmbackend.backends.python.model")
_CALLER_OF_CALLER = 2


class Logger:
    INFO: ClassVar[int] = logging.INFO
    WARNING: ClassVar[int] = logging.WARNING
    ERROR: ClassVar[int] = logging.ERROR
    VERBOSE: ClassVar[int] = logging.DEBUG

    @staticmethod
    def log(message: str, level: int = logging.INFO) -> None:
        _log.log(level, "%s", message, stacklevel=_CALLER_OF_CALLER)

    @staticmethod
    def log_info(message: str) -> None:
        _log.info("%s", message, stacklevel=_CALLER_OF_CALLER)

    @staticmethod
    def log_warn(message: str) -> None:
        _log.warning("%s", message, stacklevel=_CALLER_OF_CALLER)

    @staticmethod
    def log_error(message: str) -> None:
        _log.error("%s", message, stacklevel=_CALLER_OF_CALLER)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log.debug("%s", message, stacklevel=_CALLER_OF_CALLER)
