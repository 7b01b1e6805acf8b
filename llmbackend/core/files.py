"""Loading of Python files outside the package (backends, repository agents, batching strategies), and path checks for
configurations."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from .errors import TritonError, internal

log = logging.getLogger(__name__)
Library = TypeVar("Library")


def load_library(what: str, source: object, load: Callable[[], Library]) -> Library:
    """Returns the result of `load`. If `load` raises anything but a TritonError, raises TritonError INTERNAL with
    Triton's text."""
    try:
        return load()
    except TritonError:
        raise
    except Exception as error:
        log.exception("unable to load %s %s", what, source)
        raise internal(f"unable to load {what}: {type(error).__name__}: {error}") from None


def call_entry_point(owner: str, entry_point: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of a library. Its TritonErrors are raised as copies; others are logged and become INTERNAL."""
    try:
        return entry_point(*arguments)
    except TritonError as error:
        failure = error.copy()
    except (Exception, SystemExit) as error:
        log.exception("%s of %s failed", getattr(entry_point, "__name__", entry_point), owner)
        failure = internal(f"{type(error).__name__}: {error}")
    raise failure  # outside `except`, where its context would keep the frames of the library alive


def import_file(file: Path) -> ModuleType:
    """Runs `file` as a package with a unique name, so that it can import neighbouring files relatively. Raises the
    file's exceptions."""
    name = f"llmbackend_file_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def path_inside(directory: Path, filename: str) -> Path | None:
    """The real path of a file named in a configuration, which may come from a client; None if outside `directory`."""
    try:
        path = (directory / filename).resolve()
        return path if path.is_relative_to(directory.resolve()) else None
    except (OSError, ValueError):  # a symlink loop; a NUL character
        return None
