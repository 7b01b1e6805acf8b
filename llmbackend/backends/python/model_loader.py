"""Imports a model.py as a module of its own.

For: ModelState. Does not know: what the module defines. Invariant: two models never share a module: each import has
a unique name, and the helper modules it brought in from its own directory leave `sys.modules` with the end of the
import (the model keeps them by reference), so that the `utils.py` of one model is never that of another, nor the
old one after a reload.
Source: Triton's stub puts the version and the model directory on sys.path (transcript 61).
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from llmbackend.core.backend_api import internal

from .error_text import exception_text

_import_lock = threading.Lock()
_serial = itertools.count()


def import_model_file(path: Path, search: Sequence[Path]) -> ModuleType:
    """Runs `path` as a fresh module, with `search` before sys.path.

    Raises TritonError INTERNAL with the text of the exception when the file is missing or raises.
    """
    if not path.is_file():
        raise internal(f"Failed to find the model file: {path} does not exist")
    name = f"triton_model_{next(_serial)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise internal(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    with _import_lock, _search_path(search):
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            raise internal(exception_text(error)) from error
    return module


def forget(module: ModuleType) -> None:
    sys.modules.pop(module.__name__, None)


@contextmanager
def _search_path(search: Sequence[Path]) -> Iterator[None]:
    """Model directories come first during an import; afterwards they stay at the end of sys.path for late imports."""
    entries = [str(path) for path in search]
    before = set(sys.modules)
    sys.path[:0] = entries
    try:
        yield
    finally:
        del sys.path[: len(entries)]
        sys.path.extend(entry for entry in entries if entry not in sys.path)
        for name in set(sys.modules) - before:
            if _comes_from(sys.modules[name], entries):
                del sys.modules[name]


def _comes_from(module: ModuleType, entries: Sequence[str]) -> bool:
    file = getattr(module, "__file__", None) or ""
    is_helper = not module.__name__.startswith("triton_model_")
    return is_helper and any(file.startswith(entry + "/") for entry in entries)
