"""Finds backends (shared libraries or Python modules), loads each once, and calls its TRITONBACKEND_* functions.

Invariants: a path in a model configuration cannot leave its directory; a backend is initialised once, and finalised by
`close` or after a failed Initialize. Source: Triton's backend manager and its search for libtriton_<backend>.so.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from .backend_api import API_VERSION, LLMBACKEND_API_VERSION, BackendAttributes, ExecutionPolicy, SendPolicy
from .c_api.library import CompiledBackend
from .errors import TritonError, invalid_argument, not_found, unsupported
from .files import call_entry_point, import_file, load_library
from .metrics.metric_family import MetricFamilies

log = logging.getLogger(__name__)

EXECUTE = "TRITONBACKEND_ModelInstanceExecute"
DEFAULT_MAX_BATCH_SIZE = "4"
ENTRY_POINT_GROUP = "llmbackend.backends"
ISOLATION = "isolation"
"""Setting of a compiled backend: "process" = each instance has a process of its own."""
ISOLATION_GROUP = "llmbackend.isolation"
PYTHON_BACKEND = "python"
PYTHON_BASED_FILE = "model.py"
LLM_BACKEND = "llm"
VLLM_BACKEND = "vllm"
"""Python-based in Triton, whose configurations therefore show the runtime model.py; here an installed backend."""
LLMAPI_FILE = "model.yaml"
"""In the version directory of a model for TensorRT-LLM's LLM API. The file has a section `triton_config`."""
SERVE_LLMAPI_BY = "serve-llmapi-by"
"""Setting of the python backend: which backend serves such models."""
_LLMAPI_SECTION = re.compile(rb"^triton_config\s*:", re.MULTILINE)
NOT_SERVED = {
    "dali": ("DALI pipelines", "write the preprocessing as a model of the backend python"),
    "tensorflow": (
        "TensorFlow graphs (tensorflow_graphdef) and saved models (tensorflow_savedmodel)",
        "convert the model to ONNX or OpenVINO",
    ),
    "tensorrt": (
        "TensorRT plans (tensorrt_plan)",
        "export what the plan was built from to ONNX, OpenVINO or TorchScript",
    ),
}
"""Triton's backends that this server does not have: the formats that they serve, and what to do instead."""


class BackendFunctions:
    """The functions of one backend library, by the names in backend_api. They raise only TritonErrors.

    library: its attributes are the functions; None = none, for a model without a backend (an ensemble)
    """

    def __init__(self, backend: str, library: object) -> None:
        self.backend = backend
        self._library = library
        self._owner = f"backend '{backend}'"

    def has(self, name: str) -> bool:
        return getattr(self._library, name, None) is not None

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the function, if the library has it."""
        function: Callable[..., Any] | None = getattr(self._library, name, None)
        return None if function is None else call_entry_point(self._owner, function, *arguments)

    def finalize(self, name: str, subject: Any) -> None:
        """Calls a Finalize function and logs its error."""
        try:
            self.call(name, subject)
        except TritonError as error:
            log.error("failed to finalize backend '%s' (%s): %s", self.backend, name, error.status)


class LoadedBackend:
    """backend_api.Backend, and the backend's functions.

    runtime: the default for models whose configuration names none
    is_compiled: whether it is a shared library, which may read any field of a model configuration
    """

    api_version = API_VERSION

    def __init__(
        self,
        name: str,
        directory: Path,
        config: Mapping[str, str],
        functions: BackendFunctions,
        families: MetricFamilies,
        runtime: str,
    ) -> None:
        self.state: Any = None
        self.execution_policy = ExecutionPolicy.BLOCKING
        self.send_policy = SendPolicy.IMMEDIATE
        self.resumes = False
        self.name = name
        self.directory = directory
        self.config = config
        self.functions = functions
        self.runtime = runtime
        self.metric_family = families.get
        self.is_compiled = False

    def attributes(self) -> BackendAttributes:
        """The result of GetBackendAttribute, or the defaults if that fails."""
        attributes = BackendAttributes()
        try:
            self.functions.call("TRITONBACKEND_GetBackendAttribute", self, attributes)
        except TritonError as error:
            log.warning("backend '%s': ignored attributes: %s", self.name, error.status)
            return BackendAttributes()
        return attributes


class BackendManager:
    """Loads and owns backends. Thread-safe. As in Triton, backends are loaded and initialised one at a time."""

    def __init__(
        self,
        directory: Path | None,
        settings: Mapping[str, Mapping[str, str]],
        auto_complete_config: bool,
        families: MetricFamilies,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._auto_complete_config = auto_complete_config
        self._families = families
        self._lock = threading.Lock()
        self._backends: dict[tuple[str, str], LoadedBackend] = {}

    def get(self, backend: str, model: str, version_directory: Path, runtime: str) -> LoadedBackend:
        """The backend of a model, loaded and initialised on first use. "" = one without functions.

        Raises TritonError if the backend is not found, has no Execute function, or fails to initialise.
        """
        if not backend:
            return LoadedBackend("", Path(), {}, BackendFunctions("", None), self._families, "")
        if backend == PYTHON_BACKEND and _is_llmapi(version_directory):
            backend = self._backend_of_llmapi(model)
        location = find_backend(backend, model, version_directory, self._directory, runtime)
        key = (backend, location.key)
        with self._lock:
            if key not in self._backends:
                self._backends[key] = self._load(backend, location)
            return self._backends[key]

    def table(self) -> list[tuple[str, str, str]]:
        """Name, directory and settings of every loaded backend."""
        with self._lock:
            loaded = list(self._backends.values())
        return sorted(
            (one.name, str(one.directory), json.dumps({"cmdline": dict(one.config)}, separators=(",", ":")))
            for one in loaded
        )

    def close(self) -> None:
        """Finalises all backends in reverse order of loading."""
        with self._lock:
            for loaded in reversed(self._backends.values()):
                loaded.functions.finalize("TRITONBACKEND_Finalize", loaded)
            self._backends.clear()

    def _backend_of_llmapi(self, model: str) -> str:
        backend = self._settings.get(PYTHON_BACKEND, {}).get(SERVE_LLMAPI_BY, LLM_BACKEND)
        if backend not in (LLM_BACKEND, PYTHON_BACKEND):
            raise invalid_argument(
                f"backend config '{SERVE_LLMAPI_BY}' of the python backend is '{backend}', expected '{LLM_BACKEND}' or "
                f"'{PYTHON_BACKEND}'"
            )
        if backend == LLM_BACKEND:
            log.info(
                "model '%s' is of TensorRT-LLM's llmapi layout: the backend '%s' serves it, and model.py is not run; "
                "--backend-config=%s,%s=%s runs it",
                *(model, LLM_BACKEND, PYTHON_BACKEND, SERVE_LLMAPI_BY, PYTHON_BACKEND),
            )
        return backend

    def _load(self, backend: str, location: BackendLocation) -> LoadedBackend:
        config = self._config(location)
        module = load_library("backend library", location.key, partial(_load_module, backend, location, config))
        if not callable(getattr(module, EXECUTE, None)):
            raise not_found(f"unable to find required entrypoint '{EXECUTE}' in backend library of '{backend}'")
        check_extension_version(backend, module)
        directory = location.directory
        if location.file is None and directory == Path():
            directory = Path(module.__file__ or ".").parent
        runtime = PYTHON_BASED_FILE if location.is_python_based else ""
        functions = BackendFunctions(backend, module)
        loaded = LoadedBackend(backend, directory, config, functions, self._families, runtime)
        loaded.is_compiled = location.is_compiled
        try:
            functions.call("TRITONBACKEND_Initialize", loaded)
        except TritonError:
            functions.finalize("TRITONBACKEND_Finalize", loaded)
            raise
        return loaded

    def _config(self, location: BackendLocation) -> dict[str, str]:
        """Triton's defaults, overridden by the settings for all backends, then by those for this backend."""
        config = {
            "backend-directory": str(self._directory or ""),
            "min-compute-capability": "6.000000",
            "auto-complete-config": str(self._auto_complete_config).lower(),
            **self._settings.get("", {}),
            **self._settings.get(location.settings_name, {}),
        }
        config.setdefault("default-max-batch-size", DEFAULT_MAX_BATCH_SIZE)
        return config


def check_extension_version(backend: str, module: object) -> None:
    """Compares a backend's LLMBACKEND_API_VERSION with the host's, as check_api_version does for Triton's API.

    Raises TritonError UNSUPPORTED for another major or a later minor version, INVALID_ARG for a malformed one.
    """
    needed = getattr(module, "LLMBACKEND_API_VERSION", None)
    if needed is None:
        if named := [name for name in vars(module) if name.startswith("LLMBACKEND_")]:
            log.warning("backend '%s' has %s, but no LLMBACKEND_API_VERSION: assuming (1, 0)", backend, named[0])
        return
    try:
        major, minor = map(int, needed)
    except (TypeError, ValueError):
        raise invalid_argument(
            f"LLMBACKEND_API_VERSION of backend '{backend}' is {needed!r}, expected a pair of numbers as "
            f"{LLMBACKEND_API_VERSION}"
        ) from None
    host_major, host_minor = LLMBACKEND_API_VERSION
    if host_major != major or host_minor < minor:
        raise unsupported(
            f"backend '{backend}' was written for LLMBACKEND_API_VERSION {major}.{minor}, this server has "
            f"{host_major}.{host_minor}"
        )


def _is_llmapi(version_directory: Path) -> bool:
    """Whether a model of the python backend has the layout of TensorRT-LLM's llmapi models."""
    try:
        return _LLMAPI_SECTION.search((version_directory / LLMAPI_FILE).read_bytes()) is not None
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class BackendLocation:
    """Where a backend's module is: in a file, or in an installed package (then `file` is None)."""

    key: str
    """A backend is initialised once per key."""
    directory: Path
    """`Backend.directory`; Path() = that of its module."""
    settings_name: str
    """The name of its settings in --backend-config."""
    load: Callable[[], ModuleType | CompiledBackend]
    """Imports the module. Raises the module's exceptions."""
    file: Path | None = None
    is_python_based: bool = False
    """The python backend under another name, with one model.py for all of its models."""

    @property
    def is_compiled(self) -> bool:
        return self.file is not None and self.file.suffix == ".so"


def find_backend(
    backend: str, model: str, version_directory: Path, backend_directory: Path | None, runtime: str
) -> BackendLocation:
    """Searches the version, model and backend directories, then Python-based backends, then installed entry points.

    runtime: file name from the model's configuration; "" = the default names. Raises TritonError INVALID_ARG, with
        Triton's text, if nothing is found or a path leaves its directory.
    """
    _check_name(backend)
    own_directory = backend_directory / backend if backend_directory is not None else None
    directories = [version_directory, version_directory.parent, *([own_directory] if own_directory else [])]
    if runtime != PYTHON_BASED_FILE:
        for directory in directories:
            for name in (runtime,) if runtime else (f"libtriton_{backend}.so", "backend.py", f"triton_{backend}.py"):
                file = _inside(directory, name)
                if file.is_file():
                    return BackendLocation(str(file), directory, backend, _loader(file), file)
    if not runtime or runtime == PYTHON_BASED_FILE:
        if own_directory is not None and (own_directory / PYTHON_BASED_FILE).is_file():
            return _python_based(backend, own_directory, directories, backend_directory)
        installed = _installed(backend) if not runtime or backend == VLLM_BACKEND else None
        if installed is not None:
            return installed
    if runtime == PYTHON_BASED_FILE:
        file = (own_directory or Path(backend)) / runtime
        raise invalid_argument(
            f"unable to find Python backend based backend library '{runtime}' for model '{model}', searched: '{file}'"
        )
    raise _not_found(backend, model, directories, runtime)


def _loader(file: Path) -> Callable[[], ModuleType | CompiledBackend]:
    return partial(CompiledBackend, file) if file.suffix == ".so" else partial(import_file, file)


def _load_module(backend: str, location: BackendLocation, config: Mapping[str, str]) -> ModuleType | CompiledBackend:
    """Raises TritonError INVALID_ARG for an unknown isolation. Python backends support none."""
    isolation = config.get(ISOLATION, "")
    if location.file is None or not location.is_compiled or isolation in ("", "none"):
        return location.load()
    for entry_point in entry_points(group=ISOLATION_GROUP, name=isolation):
        loader = f"{CompiledBackend.__module__}:{CompiledBackend.__qualname__}"
        isolated: CompiledBackend = entry_point.load()(location.file, loader)
        return isolated
    raise invalid_argument(f"backend config '{ISOLATION}' of backend '{backend}' is '{isolation}', expected 'process'")


def _python_based(
    backend: str, own_directory: Path, directories: list[Path], backend_directory: Path | None
) -> BackendLocation:
    """The python backend, serving `<backend-directory>/<backend>/model.py` under the name `backend`."""
    key = str((own_directory / PYTHON_BASED_FILE).resolve())
    python_directory = backend_directory / PYTHON_BACKEND if backend_directory is not None else own_directory
    for directory in (*directories, python_directory):
        for name in (f"libtriton_{PYTHON_BACKEND}.so", f"triton_{PYTHON_BACKEND}.py"):
            file = directory / name
            if file.is_file():
                return BackendLocation(key, own_directory, PYTHON_BACKEND, _loader(file), file, True)
    installed = _installed(PYTHON_BACKEND)
    if installed is None:
        raise invalid_argument(
            f"backend '{backend}' is python-based ({key}), but no backend '{PYTHON_BACKEND}' is installed"
        )
    return BackendLocation(key, own_directory, PYTHON_BACKEND, installed.load, is_python_based=True)


def installed_backends() -> list[str]:
    """Names of the backends of installed packages."""
    return sorted(entry_points(group=ENTRY_POINT_GROUP).names)


def _installed(backend: str) -> BackendLocation | None:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=backend):
        return BackendLocation(f"{ENTRY_POINT_GROUP}:{backend}", Path(), backend, entry_point.load)
    return None


def _check_name(backend: str) -> None:
    if Path(backend).name != backend or backend in ("", ".", ".."):
        raise invalid_argument(f"backend name '{backend}' escapes backend directory, check model config backend field")


def _inside(directory: Path, name: str) -> Path:
    """`directory/name`. `name` must not lead out of the directory, except through a symbolic link made by the
    repository's owner."""
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
    if backend not in NOT_SERVED:
        return ""
    formats, instead = NOT_SERVED[backend]
    return (
        f" This server has no backend for {formats}: {instead} (its backends are {', '.join(installed_backends())}), "
        f"or put a compiled libtriton_{backend}.so into <backend-directory>/{backend}; it is loaded unmodified."
    )
