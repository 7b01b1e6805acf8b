"""A model's own batching strategy: a `batchstrategy.py` that decides which requests may still join a batch.

For: the dynamic batcher and model loading. Does not know: queues; a strategy can only end a batch earlier. Invariants:
every FormingBatch is finalised; when a strategy fails, the request is left out, the error is logged, and no request
fails.
Source: SetBatchingStrategy in Triton's backend_model.cc, CustomBatch* in dynamic_batch_scheduler.cc.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.backend_api import Model, Request
from llmbackend.core.errors import TritonError, internal, invalid_argument, not_found, unsupported
from llmbackend.core.files import import_file

log = logging.getLogger(__name__)

PATH_PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
MODULE_NAME = "batchstrategy.py"
NATIVE_NAME = "batchstrategy.so"
FUNCTIONS = (
    "TRITONBACKEND_ModelBatchIncludeRequest",
    "TRITONBACKEND_ModelBatchInitialize",
    "TRITONBACKEND_ModelBatchFinalize",
    "TRITONBACKEND_ModelBatcherFinalize",
    "TRITONBACKEND_ModelBatcherInitialize",
)


class FormingBatch:
    """One batch that is being put together."""

    def __init__(self, include: Callable[[Request, Any], bool], state: Any, model: str) -> None:
        self._include = include
        self._state = state
        self._model = model

    def includes(self, request: Request) -> bool:
        """Whether the request may join. If so, the strategy counts it as joined."""
        try:
            return bool(self._include(request, self._state))
        except Exception:
            log.exception("Custom batching include function failed for model %s", self._model)
            return False


class BatchStrategy:
    """The five functions for one model version, from `initialize` to `finalize`.

    Where Triton loads a batchstrategy.so, this host loads a Python module with the same five names. They run under the
    queue's lock, as in Triton, so they must be quick.

    TRITONBACKEND_ModelBatcherInitialize(model: Model) -> batcher          once per model version
    TRITONBACKEND_ModelBatcherFinalize(batcher) -> None                    before the model is finalised
    TRITONBACKEND_ModelBatchInitialize(batcher) -> batch                   a batch begins to form; its own state
    TRITONBACKEND_ModelBatchIncludeRequest(request: Request, batch) -> bool
    TRITONBACKEND_ModelBatchFinalize(batch) -> None
    """

    def __init__(self, model: str, module: str, functions: dict[str, Callable[..., Any]]) -> None:
        self._model = model
        self._module = module
        self._functions = functions
        self._batcher: Any = None

    def initialize(self, model: Model) -> None:
        """Raises the strategy's TritonError; its other exceptions become INTERNAL."""
        try:
            self._batcher = self._functions["TRITONBACKEND_ModelBatcherInitialize"](model)
        except TritonError as error:
            raise TritonError(error.message, error.code) from None
        except Exception as error:
            log.exception("Custom batcher initialization failed for model %s", self._model)
            raise internal(f"{type(error).__name__}: {error}") from None

    def finalize(self) -> None:
        self._call("batcher finalization", "TRITONBACKEND_ModelBatcherFinalize", self._batcher)
        self._batcher = None
        sys.modules.pop(self._module, None)  # the next load may find another file

    @contextmanager
    def new_batch(self) -> Iterator[FormingBatch]:
        state = self._call("batching initialization", "TRITONBACKEND_ModelBatchInitialize", self._batcher)
        try:
            yield FormingBatch(self._functions["TRITONBACKEND_ModelBatchIncludeRequest"], state, self._model)
        finally:
            self._call("batching finalization", "TRITONBACKEND_ModelBatchFinalize", state)

    def _call(self, what: str, name: str, argument: Any) -> Any:
        try:
            return self._functions[name](argument)
        except Exception:
            log.exception("Custom %s failed for model %s", what, self._model)
            return None


def load_strategy(model: Model) -> BatchStrategy | None:
    """The strategy of a model version, initialised; None when it has none.

    Raises TritonError: INVALID_ARG for a module that lacks functions, a path out of the model's directory or a sequence
    model, NOT_FOUND for a path that does not exist, UNSUPPORTED for native code, or what its initialisation raised.
    """
    path = _find(model.config, model)
    if path is None:
        return None
    log.info("Loading custom batching strategy library %s for model %s", path, model.name)
    module = _import(path)
    functions = _functions(module, path, model.name)
    if not functions:
        return None
    strategy = BatchStrategy(model.name, module.__name__, functions)
    strategy.initialize(model)
    return strategy


def _find(config: ModelConfig, model: Model) -> Path | None:
    """The module that the configuration names, or the first of: version, model and backend directory."""
    if PATH_PARAMETER in config.parameters:
        if config.HasField("sequence_batching"):
            raise invalid_argument(
                f"{PATH_PARAMETER} cannot be specified with sequence batcher, using default batching strategy"
            )
        return _named(config.parameters[PATH_PARAMETER].string_value, model)
    if not config.HasField("dynamic_batching"):
        return None
    for directory in _directories(model):
        path = directory / MODULE_NAME
        if path.is_file():
            return path
        if (directory / NATIVE_NAME).is_file():
            raise _native(directory / NATIVE_NAME, model.name)
    return None


def _directories(model: Model) -> list[Path]:
    backends = model.backend.config.get("backend-directory", "")
    own = [Path(backends) / model.backend.name] if backends else []
    return [model.version_directory, model.directory, *own, model.backend.directory]


def _named(text: str, model: Model) -> Path:
    """The path in the parameter, relative to the model's directory."""
    path = model.directory / text
    if not path.resolve().is_relative_to(model.directory.resolve()):
        raise invalid_argument(
            f"batching library path '{text}' escapes model directory '{model.directory}', for model '{model.name}', "
            f"check model config parameter {PATH_PARAMETER}"
        )
    if not path.is_file():
        raise not_found(f"Batching library path not found: {text}")
    if path.suffix != ".py":
        raise _native(path, model.name)
    return path


def _native(path: Path, model: str) -> TritonError:
    return unsupported(
        f"custom batching library '{path}' of model '{model}' is native code; this server loads a {MODULE_NAME} with "
        f"the same functions"
    )


def _import(path: Path) -> ModuleType:
    try:
        return import_file(path)
    except Exception as error:
        log.exception("unable to load batching library %s", path)
        raise internal(f"unable to load batching library: {type(error).__name__}: {error}") from None


def _functions(module: ModuleType, path: Path, model: str) -> dict[str, Callable[..., Any]]:
    """The five functions, or none of them, as Triton allows."""
    functions = {name: function for name in FUNCTIONS if callable(function := getattr(module, name, None))}
    if functions and len(functions) < len(FUNCTIONS):
        raise invalid_argument(f"{path} does not define all required custom batching functions for model {model}")
    return functions
