"""The text of a Python exception as Triton's python backend shows it to a client.

For: every place where a model's code may raise. Does not know: Triton's error codes. Invariant: only frames of the
model's own call are named, innermost first; frames of this package never are.
Source: transcripts 07 and 13 of a real Triton (the layout is that of pybind11's `error_already_set`).
"""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

from .errors import WrongReturnError

_PACKAGE_DIRECTORY = str(Path(__file__).parent)
_IMPORTLIB_FILE = importlib.__file__


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
    """The file and line that raised; `model_file` where no frame is the model's."""
    frames = _model_frames(error)
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else (model_file, 0)


def _model_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_PACKAGE_DIRECTORY, "<frozen importlib", _IMPORTLIB_FILE))
    ]
