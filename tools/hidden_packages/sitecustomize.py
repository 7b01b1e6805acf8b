"""Hides installed packages from every Python process that has this directory in PYTHONPATH.

Used by `tools/serving_packages.py`, which names the packages in HIDDEN_PACKAGES. Python imports a module of this name
when it starts. Invariant: importing a hidden package fails as if it were not installed; its files are unchanged.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

HIDDEN = frozenset(os.environ.get("HIDDEN_PACKAGES", "").split(","))


class Hiding:
    """A finder that does not find hidden packages."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, *arguments: Any) -> ModuleSpec | None:
        if name.partition(".")[0] in HIDDEN:
            return None
        found: ModuleSpec | None = self._finder.find_spec(name, *arguments)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)


sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
