"""Imports a model's model.py the way Triton's stub does.

For: the runner. Does not know: what the module defines. Invariants: modules beside model.py and one directory up are
found after those of the environment; model.py is a module of the package named as its version, so that relative
imports and pickled classes find it; no bytecode is written beside a model, because a repository may be read-only and a
reload within a second must see the change.
Source: sys.path in transcript 61, and the stub of Triton's python backend, which imports "<version>.model".
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_version_directory = ""


def load_class(path: str, version_directory: str) -> Any:
    """The TritonPythonModel of model.py. Raises whatever running it raises."""
    global _version_directory
    _version_directory = version_directory
    file = Path(path)
    sys.dont_write_bytecode = True
    sys.path += [str(file.parent), str(file.parent.parent)]
    package = ModuleType(Path(version_directory).name)
    package.__path__ = [str(file.parent)]
    sys.modules[package.__name__] = package
    module = importlib.import_module(f"{package.__name__}.{file.stem}")
    found = getattr(module, "TritonPythonModel", None)
    if found is None:
        raise AttributeError(f"module '{file.name}' has no attribute 'TritonPythonModel'")
    return found


def get_model_dir() -> str:
    """The directory that holds the running model's version: `<repository>/<model>/<version>`."""
    if not _version_directory:
        raise RuntimeError("pb_utils.get_model_dir works only in the process of a model instance")
    return _version_directory
