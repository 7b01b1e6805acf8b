"""`<python> boot.py PACKAGE DIRECTORY MODULE ARGUMENT…`: runs `MODULE.main(*arguments)` of the package in DIRECTORY,
even if another package of that name is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys


def load_package(name: str, directory: str) -> None:
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(directory, "__init__.py"), submodule_search_locations=[directory]
    )
    assert spec is not None and spec.loader is not None
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]
    package, package_directory, module, *arguments = sys.argv[1:]
    sys.argv = [""]
    load_package(package, package_directory)
    importlib.import_module(module).main(*arguments)
