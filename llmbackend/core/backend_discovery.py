"""Where a backend's Python module is: the search that Triton does for libtriton_<backend>.so.

For: backend_manager. Does not know: what a backend exports, models' states. Invariant: a path that a model
configuration names never leaves the directory it is looked up in.
Source: Triton's backend search order (reference: §2.4 of the backend API contract).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from .errors import TritonError, invalid_argument

ENTRY_POINT_GROUP = "llmbackend.backends"
PYTHON_BACKEND = "python"
PYTHON_BASED_FILE = "model.py"
_NOT_SERVED = {
    "openvino": "OpenVINO models",
    "tensorflow": "TensorFlow graphs and saved models",
    "tensorrt": "TensorRT plans",
}
"""By backend of NVIDIA's server: what this one has no backend for, and models are often found to be."""


@dataclass(frozen=True, slots=True)
class BackendLocation:
    """Where a backend's module comes from. `directory` is what the backend sees as its own.

    `key` tells backends apart: a module is initialised once per key. `settings_name` is the name of its
    --backend-config.
    """

    key: str
    directory: Path
    settings_name: str
    file: Path | None = None
    entry_point: EntryPoint | None = None
    is_python_based: bool = False


def find_backend(
    backend: str, model: str, version_directory: Path, backend_directory: Path | None, runtime: str
) -> BackendLocation:
    """The first of: version, model and backend directory; a python-based backend; an installed entry point.

    Raises TritonError INVALID_ARG, with Triton's text, when there is none or when a path escapes its directory.
    """
    _check_name(backend)
    own_directory = backend_directory / backend if backend_directory is not None else None
    directories = [version_directory, version_directory.parent, *([own_directory] if own_directory else [])]
    if runtime != PYTHON_BASED_FILE:
        for directory in directories:
            for name in (runtime,) if runtime else ("backend.py", f"triton_{backend}.py"):
                file = _inside(directory, name)
                if file.is_file():
                    return BackendLocation(str(file), directory, backend, file=file)
    if not runtime or runtime == PYTHON_BASED_FILE:
        if own_directory is not None and (own_directory / PYTHON_BASED_FILE).is_file():
            return _python_based(backend, own_directory, directories, backend_directory)
        installed = _installed(backend)
        if installed is not None:
            return installed
    raise _not_found(backend, model, directories, runtime)


def _python_based(
    backend: str, own_directory: Path, directories: list[Path], backend_directory: Path | None
) -> BackendLocation:
    """The `python` backend, serving `<backend-dir>/<backend>/model.py` under that backend's name."""
    key = str((own_directory / PYTHON_BASED_FILE).resolve())
    python_directory = backend_directory / PYTHON_BACKEND if backend_directory is not None else own_directory
    for directory in (*directories, python_directory):
        file = directory / f"triton_{PYTHON_BACKEND}.py"
        if file.is_file():
            return BackendLocation(key, own_directory, PYTHON_BACKEND, file=file, is_python_based=True)
    installed = _installed(PYTHON_BACKEND)
    if installed is None:
        raise invalid_argument(
            f"backend '{backend}' is python-based ({key}), but no backend '{PYTHON_BACKEND}' is installed"
        )
    entry_point = installed.entry_point
    return BackendLocation(key, own_directory, PYTHON_BACKEND, entry_point=entry_point, is_python_based=True)


def installed_backends() -> list[str]:
    """The names of the backends that installed packages bring along."""
    return sorted(entry_points(group=ENTRY_POINT_GROUP).names)


def _installed(backend: str) -> BackendLocation | None:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=backend):
        return BackendLocation(f"{ENTRY_POINT_GROUP}:{backend}", Path(), backend, entry_point=entry_point)
    return None


def _check_name(backend: str) -> None:
    if Path(backend).name != backend or backend in ("", ".", ".."):
        raise invalid_argument(f"backend name '{backend}' escapes backend directory, check model config backend field")


def _inside(directory: Path, name: str) -> Path:
    """`directory/name`, which must lie in `directory`."""
    # A link that the repository's owner made is fine; a name in a configuration that climbs out is not.
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise invalid_argument(
            f"backend library '{name}' escapes backend directory '{directory}', check model config runtime field"
        )
    return directory / name


def _not_found(backend: str, model: str, directories: list[Path], runtime: str) -> TritonError:
    if not runtime:
        return invalid_argument(
            f"unable to find backend library for backend '{backend}', "
            f"try specifying runtime on the model configuration.{_why_not_served(backend)}"
        )
    searched = "".join(f"'{directory}' " for directory in directories)
    return invalid_argument(f"unable to find backend library '{runtime}' for model '{model}', searched: {searched}")


def _why_not_served(backend: str) -> str:
    if backend not in _NOT_SERVED:
        return ""
    installed = ", ".join(sorted(entry_points(group=ENTRY_POINT_GROUP).names))
    return f" This server does not run {_NOT_SERVED[backend]}, its backends are {installed}."
