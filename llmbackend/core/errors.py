"""The one error type that crosses the host, with Triton's eight codes.

For: every failure that a client or a backend can see. Does not know: HTTP or gRPC; each frontend maps `ErrorCode` to
its own status in one table. Invariant: an error carries the text a client may read, and nothing else (no stack, no
path of ours).
Source: TRITONSERVER_Error_Code in Triton's tritonserver.h.
"""

from __future__ import annotations

import reprlib
from enum import Enum


class ErrorCode(Enum):
    """Triton's error codes; `value` is the label that Triton prints before a message."""

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARG = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"


class TritonError(Exception):
    """An error with a Triton code. `str(error)` is the bare message, `error.status` is `"<Code>: <message>"`."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        super().__init__(message)
        self.message = message
        self.code = code

    @property
    def status(self) -> str:
        return f"{self.code.value}: {self.message}"

    def __reduce__(self) -> tuple[type[TritonError], tuple[str, ErrorCode]]:
        return (type(self), (self.message, self.code))


def invalid_argument(message: str) -> TritonError:
    return TritonError(message, ErrorCode.INVALID_ARG)


def not_found(message: str) -> TritonError:
    return TritonError(message, ErrorCode.NOT_FOUND)


def unavailable(message: str) -> TritonError:
    return TritonError(message, ErrorCode.UNAVAILABLE)


def unsupported(message: str) -> TritonError:
    return TritonError(message, ErrorCode.UNSUPPORTED)


def internal(message: str) -> TritonError:
    return TritonError(message, ErrorCode.INTERNAL)


def cancelled(message: str) -> TritonError:
    return TritonError(message, ErrorCode.CANCELLED)


def as_triton_error(error: BaseException) -> TritonError:
    """Any exception as one that a client may read."""
    if isinstance(error, TritonError):
        return error
    return TritonError(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL)


_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxstring, _shortened.maxother = 4, 80, 80


def shown(value: object) -> str:
    """`value` as an error's text shows it: a client's value may be of any size and depth, the text is not."""
    return _shortened.repr(value)


_LONGEST_ID_SHOWN = 256
_LONGEST_NAME_SHOWN = 255


def shown_name(name: str) -> str:
    """A model's name as an error shows it: a client may ask for one of any length."""
    return name[:_LONGEST_NAME_SHOWN]


def request_tag(request_id: str) -> str:
    """The prefix that Triton's core puts before every message about a request; of an id too long for a gRPC status only
    the beginning."""
    return f"[request id: {request_id[:_LONGEST_ID_SHOWN] or '<id_unknown>'}] "
