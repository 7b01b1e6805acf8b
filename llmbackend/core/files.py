"""Imports Python files beside models (backends, agents, strategies), each under a unique module name, and checks paths
in configurations."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_file(file: Path) -> ModuleType:
    """Runs `file` as a package, so that it can import files beside it relatively. Raises what the file raises."""
    name = f"llmbackend_file_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def path_inside(directory: Path, filename: str) -> Path | None:
    """The real path of a file that a configuration, perhaps a client's, names; None outside of `directory`."""
    try:
        path = (directory / filename).resolve()
        return path if path.is_relative_to(directory.resolve()) else None
    except (OSError, ValueError):  # a loop of links; a NUL
        return None
