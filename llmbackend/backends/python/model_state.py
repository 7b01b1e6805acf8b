"""What this backend keeps per model version: where its model.py is, and the configuration it completes.

For: backend.py and the instances. Does not know: requests. Invariant: the module imported for auto_complete_config
serves the first instance; each further instance imports its own, as each has its own process in Triton.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Any

from llmbackend.core.backend_api import Model, internal

from .config_json import config_from_dict, config_to_json
from .current_model import model_scope
from .error_text import exception_text
from .model_loader import ModelPackage
from .pb_model_config import ModelConfig

BACKEND_NAME = "python"
DEFAULT_MODEL_FILENAME = "model.py"


class ModelState:
    """Owned by the host's model; instances ask it for their class from any load thread."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._lock = threading.Lock()
        self._spare: ModuleType | None = None
        self._packages: list[ModelPackage] = []

    def auto_complete(self) -> None:
        """Lets the model's static `auto_complete_config` complete the configuration.

        Raises TritonError INTERNAL with the model's exception, or when it returns no ModelConfig.
        """
        module = self._import()
        self._spare = module
        complete = getattr(_model_class(module), "auto_complete_config", None)
        if complete is None:
            return
        given = ModelConfig(config_to_json(self.model.config))
        try:
            with model_scope(self.model):
                completed = complete(given)
        except BaseException as error:  # also sys.exit() of a model
            raise internal(exception_text(error)) from error
        if not isinstance(completed, ModelConfig):
            raise internal(
                f"auto_complete_config function in model '{self.model.name}' must return a valid pb.ModelConfig "
                f"object, got {type(completed).__name__}"
            )
        self.model.set_config(config_from_dict(completed.as_dict()))

    def new_python_model(self) -> Any:
        """An object of a TritonPythonModel class of its own. Raises TritonError INTERNAL with its exception."""
        with self._lock:
            module, self._spare = self._spare, None
        module = module or self._import()
        try:
            with model_scope(self.model):
                return _model_class(module)()
        except BaseException as error:  # also sys.exit() of a model
            raise internal(exception_text(error)) from error

    def release_modules(self) -> None:
        with self._lock:
            packages, self._packages = self._packages, []
        for package in packages:
            package.forget()

    def _import(self) -> ModuleType:
        with model_scope(self.model):
            package = ModelPackage(self._path())
            module = package.load()
        with self._lock:
            self._packages.append(package)
        return module

    def _path(self) -> Path:
        """A python-based backend brings the model.py of all its models; otherwise each version has its own."""
        if self.model.backend.name != BACKEND_NAME:
            return self.model.backend.directory / DEFAULT_MODEL_FILENAME
        return self.model.version_directory / (self.model.config.default_model_filename or DEFAULT_MODEL_FILENAME)


def _model_class(module: ModuleType) -> Any:
    found = getattr(module, "TritonPythonModel", None)
    if found is None:
        raise internal(f"AttributeError: module '{DEFAULT_MODEL_FILENAME}' has no attribute 'TritonPythonModel'")
    return found
