"""Imports a Python file that is no part of an installed package: a backend or a repository agent.

For: those who load them. Does not know: what is in the file. Invariant: each file has a module name of its own, so that
two files of the same name do not meet.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_file(file: Path) -> ModuleType:
    """Runs `file` as a package, so that it may import its neighbours relatively. Raises whatever the file raises."""
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
