"""Runs a module of this package in another Python, because the host's environment may lack what the engine needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import llmbackend

from . import boot

THIS_PYTHON = ""
"""Stands for the interpreter that runs this."""
HOST_PACKAGE = ("llmbackend", str(Path(llmbackend.__file__).parent))
"""Name and directory of this package."""
_NOT_FOR_OTHERS = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV")


def is_this(interpreter: str) -> bool:
    return interpreter in (THIS_PYTHON, sys.executable)


def command(interpreter: str, module: str, package: tuple[str, str] = HOST_PACKAGE) -> list[str]:
    """The beginning of a command that calls `main` of a module of `package`; its arguments follow."""
    return [interpreter or sys.executable, "-u", boot.__file__, *package, module]


def environment(interpreter: str) -> dict[str, str]:
    """The variables for a process of that interpreter."""
    if is_this(interpreter):
        return dict(os.environ)
    return {name: value for name, value in os.environ.items() if name not in _NOT_FOR_OTHERS}
