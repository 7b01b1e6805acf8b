"""Imports a model.py, and the helper modules beside it, into a private package of its own.

For: ModelState. Does not know: what the module defines. Invariant: two imports never share a module: `import utils` in
one model never finds the `utils.py` of another, nor its own from before a reload, also when it runs late or in a thread
of the model. Each module of a package therefore has its own `__import__`, which looks where Python looks first and then
beside model.py (Triton's stub appends that directory and its parent to sys.path; see transcript 61).
What is not caught: `importlib.import_module("utils")`, and unpickling a model's classes in another process.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from llmbackend.core.backend_api import internal

from .error_text import exception_text

_serial = itertools.count()
_packages: dict[str, ModelPackage] = {}


class ModelPackage:
    """The modules of one import of a model. Owner of its names in `sys.modules`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = f"triton_model_{next(_serial)}"
        self._directories = [str(path.parent), str(path.parent.parent)]
        self._own: dict[str, bool] = {}
        self.builtins = {**vars(builtins), "__import__": self._import}

    def load(self) -> ModuleType:
        """Runs model.py. Raises TritonError INTERNAL with the text of the exception when it is missing or raises."""
        if not self._path.is_file():
            raise internal(f"Failed to find the model file: {self._path} does not exist")
        package = ModuleType(self._name)
        package.__path__ = self._directories
        sys.modules[self._name] = package
        _packages[self._name] = self
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        importlib.invalidate_caches()
        try:
            return importlib.import_module(f"{self._name}.{self._path.stem}")
        except BaseException as error:
            self.forget()
            raise internal(exception_text(error)) from error

    def forget(self) -> None:
        """Takes the modules out of `sys.modules`; code that still runs keeps them by reference."""
        _packages.pop(self._name, None)
        for name in [name for name in sys.modules if name == self._name or name.startswith(f"{self._name}.")]:
            del sys.modules[name]

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What an import statement of this package's code calls."""
        top = name.partition(".")[0]
        if level > 0 or not self._is_own(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        module = builtins.__import__(f"{self._name}.{name}", globals, locals, fromlist or (), 0)
        return module if fromlist else sys.modules[f"{self._name}.{top}"]

    def _is_own(self, top: str) -> bool:
        """Whether `top` is beside model.py and Python's own search does not find it first."""
        if top not in self._own:
            self._own[top] = not _is_found_by_python(top) and self._is_beside(top)
        return self._own[top]

    def _is_beside(self, top: str) -> bool:
        return PathFinder.find_spec(f"{self._name}.{top}", self._directories) is not None


def _is_found_by_python(top: str) -> bool:
    """A folder that merely has this name (a namespace package, say of the working directory) does not count."""
    if top in sys.modules:
        return True
    spec = importlib.util.find_spec(top)
    return spec is not None and spec.origin is not None


class _Loader(SourceFileLoader):
    """Gives a module its package's `__import__`. Reads the source itself: a bytecode cache, which trusts a file's time
    in seconds, could hold the code from before a reload, and a repository may be read-only."""

    def __init__(self, package: ModelPackage, name: str, path: str) -> None:
        super().__init__(name, path)
        self._package = package

    def get_code(self, fullname: str) -> CodeType | None:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self._package.builtins
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules of model packages, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = _packages.get(fullname.partition(".")[0])
        if package is None or path is None:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(package, fullname, spec.loader.path)
        return spec


_finder = _Finder()
