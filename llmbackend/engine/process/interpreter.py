"""Running a module of this package in another Python.

For: the nursery and whoever needs a library of the engine's environment. Does not know: what the module does. Why: the
host may run in a lean environment (a Triton stub's, with an old numpy and no torch) and the engine in another one.
Invariant: both run this very code, whatever the other environment has installed under its name, and nothing else of
this environment goes over.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import llmbackend

_NOT_FOR_OTHERS = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV")
_BOOTSTRAP = """
import importlib.util, runpy, sys
place, module = sys.argv[1:3]
del sys.argv[1:3]
spec = importlib.util.spec_from_file_location("llmbackend", place + "/__init__.py", submodule_search_locations=[place])
package = sys.modules["llmbackend"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


THIS_PYTHON = ""
"""The interpreter that stands for the one that runs this."""


def is_this(interpreter: str) -> bool:
    return interpreter in (THIS_PYTHON, sys.executable)


def command(interpreter: str, module: str) -> list[str]:
    """The beginning of a command that runs `module` as a program; its arguments follow."""
    if is_this(interpreter):
        return [sys.executable, "-m", module]
    return [interpreter, "-c", _BOOTSTRAP, str(Path(llmbackend.__file__).parent), module]


def environment(interpreter: str) -> dict[str, str]:
    if is_this(interpreter):
        return dict(os.environ)
    return {name: value for name, value in os.environ.items() if name not in _NOT_FOR_OTHERS}
