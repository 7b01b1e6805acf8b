"""Installs the adapter into a Triton's backend directory, as a Python-based backend.

Used by `llmbackend install-triton-backend`. Independent of how the backend works. Invariant: a new installation is
complete before two renames put it in the place of the old one; a running Triton keeps what it has loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import llmbackend

PACKAGES = ("jinja2", "MarkupSafe", "ml_dtypes", "msgspec", "protobuf", "pyzmq", "tokenizers")
MODEL_CONFIG_SOURCE = ("tritonclient", "tritonclient/grpc/model_config_pb2.py")
"""Only this file of the package is needed: its __init__ would import gRPC."""
ROOMS = ("adapter", "core", "engine", "fork_server", "gguf", "links", "waiting")
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc", "native")

_MODEL_PY = '''"""Written by `llmbackend install-triton-backend`: the `llm` backend for NVIDIA's Triton server."""

import json
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_INSTALLED = json.loads((_HERE / "installed.json").read_text())
_PYTHON = "%d.%d" % sys.version_info[:2]
if _PYTHON != _INSTALLED["python"]:
    raise RuntimeError(
        f"{_HERE} was installed for Python {_INSTALLED['python']}, but this stub runs Python {_PYTHON}: run\\n"
        f"  {sys.executable} -m pip install --no-deps --upgrade --target {_HERE / 'packages'} "
        + " ".join(_INSTALLED["packages"])
        + f"\\nand write \\"{_PYTHON}\\" as \\"python\\" into {_HERE / 'installed.json'}"
    )
sys.path[:0] = [str(_HERE / "code"), str(_HERE / "packages")]
os.environ.setdefault("LLMBACKEND_ENGINE_PYTHON", _INSTALLED["engine_python"])

from llmbackend.adapter.inside_triton.triton_python_model import TritonPythonModel  # noqa: E402, F401
'''


def install(backend_directory: Path, name: str = "llm", engine_python: str = "") -> Path:
    """Writes `<backend_directory>/<name>/` and returns it.

    model.py         the module that Triton's stub imports; it adds the two folders below to the path
    installed.json   the Python that runs engines, and what was installed
    code/            this package, run by both the stub and the engine's process, so that they cannot differ
    packages/        the few libraries that the adapter needs, as they are in this environment (without numpy: the
                     stub needs the one that it was built for)

    Raises OSError, or LookupError for a library that is not installed here.
    """
    backend_directory.mkdir(parents=True, exist_ok=True)
    target = backend_directory / name
    with tempfile.TemporaryDirectory(dir=backend_directory, prefix=f".{name}-") as folder:
        new, old = Path(folder) / "new", Path(folder) / "old"
        _write(new, engine_python or sys.executable)
        if target.exists():
            os.rename(target, old)
        os.rename(new, target)
    return target


def _write(target: Path, engine_python: str) -> None:
    target.mkdir()
    (target / "model.py").write_text(_MODEL_PY)
    versions = [f"{name}=={metadata.version(name)}" for name in PACKAGES]
    installed = {
        "llmbackend": llmbackend.__version__,
        "engine_python": engine_python,
        "python": "{}.{}".format(*sys.version_info[:2]),
        "packages": versions,
    }
    (target / "installed.json").write_text(json.dumps(installed, indent=2) + "\n")
    _copy_code(target / "code" / "llmbackend")
    for name in PACKAGES:
        for source, relative in _files_of(name):
            _copy(source, target / "packages" / relative)
    _copy_model_config(target / "packages")


def _copy_code(target: Path) -> None:
    source = Path(llmbackend.__file__).parent
    target.mkdir(parents=True)
    shutil.copy(source / "__init__.py", target)
    for room in ROOMS:
        shutil.copytree(source / room, target / room, ignore=_NOT_COPIED)


def _copy_model_config(packages: Path) -> None:
    distribution, wanted = MODEL_CONFIG_SOURCE
    for source, relative in _files_of(distribution):
        if relative == wanted:
            _copy(source, packages / relative)
    for folder in Path(wanted).parents:
        if folder.name:
            (packages / folder / "__init__.py").touch()


def _files_of(distribution: str) -> Iterator[tuple[Path, str]]:
    """(path, path below site-packages) of each file. Scripts, which are elsewhere, are not needed."""
    for file in metadata.files(distribution) or ():
        if ".." not in file.parts and file.suffix != ".pyc":
            yield Path(str(file.locate())), str(file)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
