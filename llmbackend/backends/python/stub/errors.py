"""The errors of pb_utils, its argument conversions, and exceptions as Triton's python backend shows them.

An exception's text lists the frames of the model's own call, innermost first, and no frame of this package.
Source: golden transcripts 07 and 13 (the layout is that of pybind11's `error_already_set`).
"""

from __future__ import annotations

import importlib
import operator
import traceback
from pathlib import Path
from typing import ClassVar, SupportsIndex

PackedError = tuple[int, str]

_PACKAGE_DIRECTORY = str(Path(__file__).parent)
_IMPORTLIB_FILE = importlib.__file__


def text(value: str | bytes, name: str) -> str:
    """`value` as str. Bytes must be UTF-8, as in the C++ signatures: models often take names from BYTES tensors.

    Raises TypeError for another type, ValueError for bytes that are not UTF-8.
    """
    if isinstance(value, str):
        return str(value)
    if not isinstance(value, (bytes, bytearray)):
        raise TypeError(f"{name} must be str or bytes, got {type(value).__name__}")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be UTF-8, got {bytes(value)[:64]!r}: {error.reason}") from None


def integer(value: SupportsIndex, name: str, least: int, most: int) -> int:
    """Raises TypeError for another type and for a number out of range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None
    if not least <= number <= most:
        raise TypeError(f"{name} must be an int from {least} to {most}, got {number}")
    return number


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    """Models may raise it; pb_utils raises it for refusals."""


class WrongReturnError(Exception):
    """A model's function returned a value that Triton refuses; the client gets the text without the exception's
    type."""


class TritonError:
    """The error of one response; as in Triton, not an exception. Codes are those of TRITONSERVER_Error_Code."""

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


def exception_text(error: BaseException) -> str:
    """`Type: message`, then `At:` and a line `  file(line): function` per frame, if there are frames."""
    if isinstance(error, WrongReturnError):
        return str(error)
    head = f"{type(error).__name__}: {str(error) or '<EMPTY MESSAGE>'}"
    frames = _model_frames(error)
    if not frames:
        return head
    lines = "".join(f"  {frame.filename}({frame.lineno}): {frame.name}\n" for frame in reversed(frames))
    return f"{head}\n\nAt:\n{lines}"


def raised_at(error: BaseException, model_file: str) -> tuple[str, int]:
    """The file and line that raised; `model_file` if no frame is the model's."""
    frames = _model_frames(error)
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else (model_file, 0)


def _model_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE_DIRECTORY, "<frozen importlib", _IMPORTLIB_FILE))
    ]
