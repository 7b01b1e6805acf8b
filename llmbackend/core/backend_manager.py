"""Loads backends and binds their TRITONBACKEND_* functions: the dlopen and dlsym step, in Python.

For: model loading, which asks for the backend of a model. Does not know: models' life cycle, requests. Owner of every
loaded backend. Invariants: a backend is initialised once per path, one at a time; a failed Initialize is followed by
Finalize and not remembered; every remembered backend is finalised at `close`, and at no other time.
Source: Triton's backend manager (backend API contract §2.1 to §2.4).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from .backend_api import (
    API_VERSION,
    BackendAttributes,
    ExecutionPolicy,
    MetricFamily,
    MetricKind,
    ModelInstance,
    Request,
    SendPolicy,
)
from .backend_discovery import PYTHON_BASED_FILE, BackendLocation, find_backend
from .errors import TritonError, internal, not_found
from .metrics.metric_family import MetricFamilies
from .module_files import import_file

log = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_SIZE = "4"


class EntryPoints:
    """The functions of one backend module, found by name. Any exception of theirs comes out as a TritonError."""

    def __init__(self, module: ModuleType, backend: str) -> None:
        self._module = module
        self.backend = backend
        if not callable(getattr(module, "TRITONBACKEND_ModelInstanceExecute", None)):
            raise not_found(
                f"unable to find required entrypoint 'TRITONBACKEND_ModelInstanceExecute' in backend library "
                f"of '{backend}'"
            )

    def has(self, name: str) -> bool:
        """Whether the module has TRITONBACKEND_<name>."""
        return getattr(self._module, f"TRITONBACKEND_{name}", None) is not None

    def call(self, name: str, *arguments: Any) -> None:
        """Calls TRITONBACKEND_<name> if the module has it."""
        function: Callable[..., None] | None = getattr(self._module, f"TRITONBACKEND_{name}", None)
        if function is None:
            return
        try:
            function(*arguments)
        except TritonError as error:
            raise TritonError(error.message, error.code) from None
        except (Exception, SystemExit) as error:
            log.exception("TRITONBACKEND_%s of backend '%s' failed", name, self.backend)
            raise internal(f"{type(error).__name__}: {error}") from None

    def execute(self, instance: ModelInstance, requests: Sequence[Request]) -> None:
        self.call("ModelInstanceExecute", instance, requests)

    def finalize(self, name: str, subject: Any) -> None:
        """A Finalize: its error is logged, since there is nobody left to tell."""
        try:
            self.call(name, subject)
        except TritonError as error:
            log.error("failed to finalize backend '%s' (%s): %s", self.backend, name, error.status)


class NoEntryPoints(EntryPoints):
    """Those of a model without a backend: none."""

    def __init__(self) -> None:
        self._module = ModuleType("no backend")
        self.backend = ""


class LoadedBackend:
    """A backend as it sees itself (backend_api.Backend), with its entry points for the host."""

    api_version = API_VERSION

    def __init__(
        self,
        name: str,
        directory: Path,
        config: Mapping[str, str],
        entry_points: EntryPoints,
        families: MetricFamilies,
        runtime: str,
    ) -> None:
        self.state: Any = None
        self.execution_policy = ExecutionPolicy.BLOCKING
        self.send_policy = SendPolicy.IMMEDIATE
        self.name = name
        self.directory = directory
        self.config = config
        self.entry_points = entry_points
        self.runtime = runtime  # what /config shows as the runtime of a model that names none
        self._families = families

    def metric_family(
        self,
        kind: MetricKind,
        name: str,
        description: str,
        label_names: Sequence[str] | None = (),
        buckets: Sequence[float] | None = None,
    ) -> MetricFamily:
        names = None if label_names is None else tuple(label_names)
        return self._families.get(kind, name, description, names, buckets)

    def attributes(self) -> BackendAttributes:
        """What GetBackendAttribute says; its error is ignored, and so are the attributes of a failing call."""
        attributes = BackendAttributes()
        try:
            self.entry_points.call("GetBackendAttribute", self, attributes)
        except TritonError as error:
            log.warning("backend '%s': attributes are ignored: %s", self.name, error.status)
            return BackendAttributes()
        return attributes


class BackendManager:
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
        """The backend for a model, loaded and initialised at its first use; one that does nothing for the name "".

        Raises TritonError when it can not be found, lacks Execute, or fails to initialise.
        """
        if not backend:
            return LoadedBackend("", Path(), {}, NoEntryPoints(), self._families, "")
        location = find_backend(backend, model, version_directory, self._directory, runtime)
        with self._lock:
            key = (backend, location.key)
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
        """Finalises every backend, the last loaded first."""
        with self._lock:
            for loaded in reversed(self._backends.values()):
                loaded.entry_points.finalize("Finalize", loaded)
            self._backends.clear()

    def _load(self, backend: str, location: BackendLocation) -> LoadedBackend:
        module = _import(location)
        directory = location.directory
        if location.file is None and directory == Path():
            directory = Path(module.__file__ or ".").parent
        runtime = PYTHON_BASED_FILE if location.is_python_based else ""
        config = self._config(location)
        loaded = LoadedBackend(backend, directory, config, EntryPoints(module, backend), self._families, runtime)
        try:
            loaded.entry_points.call("Initialize", loaded)
        except TritonError:
            loaded.entry_points.finalize("Finalize", loaded)
            raise
        return loaded

    def _config(self, location: BackendLocation) -> dict[str, str]:
        """Settings for every backend, then this backend's, then the defaults that Triton injects."""
        config = {
            "backend-directory": str(self._directory or ""),
            "min-compute-capability": "6.000000",
            "auto-complete-config": str(self._auto_complete_config).lower(),
            **self._settings.get("", {}),
            **self._settings.get(location.settings_name, {}),
        }
        config.setdefault("default-max-batch-size", DEFAULT_MAX_BATCH_SIZE)
        return config


def _import(location: BackendLocation) -> ModuleType:
    try:
        if location.file is None:
            assert location.entry_point is not None
            module = location.entry_point.load()
            assert isinstance(module, ModuleType), "an entry point of a backend names a module"
            return module
        return import_file(location.file)
    except Exception as error:
        log.exception("unable to load backend library %s", location.key)
        raise internal(f"unable to load backend library: {type(error).__name__}: {error}") from None
