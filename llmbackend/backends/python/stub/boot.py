"""The program of a template of stub processes: `<python> boot.py CONTROL_FD HOST_PID`.

For: StubTemplate, which starts it with whatever interpreter the models' environment has. Does not know: models.
Invariant: this directory's package is loaded under a name of its own, and the directory is not on sys.path, so that
the environment needs nothing of the host's and no module here stands in the way of a model's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

PACKAGE = "triton_python_backend_stub"


def load_package() -> None:
    directory = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != directory]
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(directory, "__init__.py"), submodule_search_locations=[directory]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    load_package()
    arguments, sys.argv = sys.argv[1:], [""]
    importlib.import_module(f"{PACKAGE}.template").main(*map(int, arguments))
