"""`pb_utils.TritonError`, the error of a response, and `pb_utils.TritonModelException`, what pb_utils raises.

For: model code. Does not know: requests. Invariant: codes are the numbers of TRITONSERVER_Error_Code; the host knows
them by their place.
"""

from __future__ import annotations

from typing import ClassVar

from .arguments import text

PackedError = tuple[int, str]


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    """What a model may raise, and what pb_utils raises when it refuses something."""


class WrongReturnError(Exception):
    """A model's function returned what Triton refuses; the text is told as it is, without the exception's type."""


class TritonError:
    """The error of one response: `TritonError(message, code=TritonError.INTERNAL)`. Not an exception, as in Triton."""

    UNKNOWN: ClassVar[int] = 0
    INTERNAL: ClassVar[int] = 1
    NOT_FOUND: ClassVar[int] = 2
    INVALID_ARG: ClassVar[int] = 3
    UNAVAILABLE: ClassVar[int] = 4
    UNSUPPORTED: ClassVar[int] = 5
    ALREADY_EXISTS: ClassVar[int] = 6
    CANCELLED: ClassVar[int] = 7

    def __init__(self, message: str | bytes, code: int = INTERNAL) -> None:
        if code not in range(8):
            raise ValueError(f"TritonError code must be one of TritonError's codes 0 to 7, got {code!r}")
        self._message = text(message, "message")
        self._code = int(code)

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message
