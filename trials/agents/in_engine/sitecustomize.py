"""Makes the mock model of this process follow the script named by LLMBACKEND_TEST_SCRIPT, if it is set.

Imported by Python when an engine process starts, from a folder on PYTHONPATH, so that the server, its fork server and
its engines are started by the real code. Independent of agents. Invariant: logits remain a function of all tokens so
far, read back through the paged KV cache; nothing else in the engine is replaced.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_MODEL = "llmbackend.testing.mock_model"


class _AfterLoading(Loader):
    """The module's own loader, and then its change."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from trials.agents.scripted_logits import follow

        follow(module, os.environ["LLMBACKEND_TEST_SCRIPT"])


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODEL:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        spec.loader = _AfterLoading(spec.loader)
        return spec


if os.environ.get("LLMBACKEND_TEST_SCRIPT"):
    sys.meta_path.insert(0, _Finder())
