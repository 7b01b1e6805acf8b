"""All failures visible to clients and backends: one exception hierarchy with Triton's eight codes.

    TritonError                         any failure; `code` is Triton's
    ├── LoadError                       no version of a model was changed by a load
    ├── StartupError                    the server did not start because models failed to load
    ├── OverrideError                   a load request's configuration or files cannot be used
    ├── adapter: LoraError              the model does not serve the LoRA adapter that was requested
    └── frontends/errors.py
        ├── LimitReachedError           too many requests, or too many bytes, at the same time
        ├── PermissionDeniedError       the client's key does not allow it
        ├── BodyTooLargeError           an HTTP body over the limit; UnpackedBodyTooLargeError when it is unpacked
        └── MalformedError              a gRPC message that cannot be parsed

The engine's exceptions are in engine/errors.py. Each frontend maps `ErrorCode` to its own status in one table. An error
has only a text that a client may read (no stack trace, no path of this program).
Source: TRITONSERVER_Error_Code in Triton's tritonserver.h.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from enum import Enum


class ErrorCode(Enum):
    """Triton's error codes; `value` is the label that Triton prints before the message."""

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

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL, param: str | None = None) -> None:
        """message: its lone surrogates, which neither JSON nor protobuf can hold, become "?"
        param: the invalid request parameter, if the error concerns one"""
        self.message = message.encode("utf-8", "replace").decode()
        super().__init__(self.message)
        self.code = code
        self.param = param

    @property
    def status(self) -> str:
        return f"{self.code.value}: {self.message}"

    def copy(self, prefix: str = "") -> TritonError:
        """A new error with the same code, and `prefix` before its message. For errors that outlive their `except`
        block: the traceback of the original refers to frames, and they to requests."""
        return TritonError(prefix + self.message, self.code, self.param)

    def __reduce__(self) -> tuple[type[TritonError], tuple[str, ErrorCode, str | None]]:
        """Subclasses are pickled as plain TritonErrors."""
        return (TritonError, (self.message, self.code, self.param))


class LoadError(TritonError):
    """A load that changed no version of its model (INVALID_ARG). causes: the errors of the versions."""

    def __init__(self, name: str, reason: str, causes: Sequence[TritonError] = ()) -> None:
        super().__init__(f"load failed for model '{name}': {reason}", ErrorCode.INVALID_ARG)
        self.reason = reason.rstrip("\n")
        self.causes = tuple(causes)


class StartupError(TritonError):
    """The server did not start because models failed to load (INTERNAL). reasons: by model, without Triton's prefix."""

    def __init__(self, errors: Mapping[str, TritonError]) -> None:
        super().__init__("failed to load all models", ErrorCode.INTERNAL)
        self.reasons = {name: _reason(error) for name, error in errors.items()}


def _reason(error: TritonError) -> str:
    if not isinstance(error, LoadError):
        return str(error.__cause__ or error)
    return "; ".join(dict.fromkeys(cause.message for cause in error.causes)) or error.reason


class OverrideError(TritonError):
    """An unusable override in a load request. Its text reaches the client unchanged."""

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INVALID_ARG) -> None:
        super().__init__(message, code)


def invalid_argument(message: str, param: str | None = None) -> TritonError:
    return TritonError(message, ErrorCode.INVALID_ARG, param)


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
    """Any exception other than a TritonError becomes INTERNAL."""
    if isinstance(error, TritonError):
        return error
    return TritonError(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL)


_shortened = reprlib.Repr()
_shortened.maxlevel, _shortened.maxstring, _shortened.maxother = 4, 80, 80


def shown(value: object) -> str:
    """`value` for an error text, shortened: a value from a client may have any size and depth."""
    return _shortened.repr(value)


_MAX_ID_CHARACTERS = 256
_MAX_NAME_CHARACTERS = 255


def shown_name(name: str) -> str:
    """A model's name for an error text, shortened."""
    return name[:_MAX_NAME_CHARACTERS]


def shown_id(request_id: int | str) -> str:
    """A request's or sequence's id for an error text, shortened to fit a gRPC status."""
    return str(request_id)[:_MAX_ID_CHARACTERS]


def request_tag(request_id: str) -> str:
    """The prefix of messages about a request in Triton's core."""
    return f"[request id: {shown_id(request_id) or '<id_unknown>'}] "
