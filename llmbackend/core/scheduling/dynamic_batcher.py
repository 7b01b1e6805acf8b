"""The dynamic batcher: executes compatible queued requests together, including those of sequences (strategy `oldest`).

Invariants: a batch is a prefix of the queue; no request waits for others longer than max_queue_delay. Execute receives
separate requests. Source: GetDynamicBatch in Triton's dynamic_batch_scheduler.cc, RequiredEqualInputs; golden 59.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import MAX_SLEEP_S, Timer

from ..backend_api import Model, Request
from ..c_api.library import CompiledStrategy
from ..errors import invalid_argument, not_found
from ..files import call_entry_point, import_file, load_library
from ..metrics.model_metrics import Statistics
from ..requests.queued_request import QueuedRequest
from .request_queue import RequestQueue

log = logging.getLogger(__name__)

PATH_PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
MODULE_NAME = "batchstrategy.py"
LIBRARY_NAME = "batchstrategy.so"
FUNCTIONS = (
    "TRITONBACKEND_ModelBatchIncludeRequest",
    "TRITONBACKEND_ModelBatchInitialize",
    "TRITONBACKEND_ModelBatchFinalize",
    "TRITONBACKEND_ModelBatcherFinalize",
    "TRITONBACKEND_ModelBatcherInitialize",
)


Include = Callable[[Request], bool]
"""Whether a request may join the forming batch; if so, it has joined."""


class BatchStrategy:
    """A custom batching strategy for one model version: the five functions of a batchstrategy.so, as in Triton, or of a
    Python module. They run while the queue's lock is held, so they must be fast.

    TRITONBACKEND_ModelBatcherInitialize(model: Model) -> batcher          once per model version
    TRITONBACKEND_ModelBatcherFinalize(batcher) -> None                    before the model is finalised
    TRITONBACKEND_ModelBatchInitialize(batcher) -> batch                   the state of a batch that begins to form
    TRITONBACKEND_ModelBatchIncludeRequest(request: Request, batch) -> bool
    TRITONBACKEND_ModelBatchFinalize(batch) -> None
    """

    def __init__(self, model: str, module: str, functions: dict[str, Callable[..., Any]]) -> None:
        self._model = model
        self._module = module
        self._functions = functions
        self._batcher: Any = None

    def initialize(self, model: Model) -> None:
        """Raises TritonError if the strategy's initialization fails."""
        initialize = self._functions["TRITONBACKEND_ModelBatcherInitialize"]
        self._batcher = call_entry_point(f"the batching strategy of model '{self._model}'", initialize, model)

    def finalize(self) -> None:
        self._call("batcher finalization", "TRITONBACKEND_ModelBatcherFinalize", self._batcher)
        self._batcher = None
        sys.modules.pop(self._module, None)  # the next load may find another file

    @contextmanager
    def new_batch(self) -> Iterator[Include]:
        """The state of a new batch."""
        state = self._call("batching initialization", "TRITONBACKEND_ModelBatchInitialize", self._batcher)
        include = "TRITONBACKEND_ModelBatchIncludeRequest"
        try:
            yield lambda request: bool(self._call("batching include function", include, request, state))
        finally:
            self._call("batching finalization", "TRITONBACKEND_ModelBatchFinalize", state)

    def _call(self, what: str, name: str, *arguments: Any) -> Any:
        try:
            return self._functions[name](*arguments)
        except Exception:
            log.exception("Custom %s failed for model %s", what, self._model)
            return None


def load_strategy(model: Model) -> BatchStrategy | None:
    """The initialised strategy of a model version; None if it has none.

    Raises TritonError: INVALID_ARG for a module that lacks functions, a path outside the model's directory or a
    sequence model; NOT_FOUND for a nonexistent path; and if the strategy fails to load.
    """
    path = _find(model.config, model)
    if path is None:
        return None
    log.info("Loading custom batching strategy library %s for model %s", path, model.name)
    load: Callable[[], ModuleType | CompiledStrategy] = partial(import_file, path)
    if path.suffix == ".so":
        load = partial(CompiledStrategy, path)
    module = load_library("batching library", path, load)
    functions = _functions(module, path, model.name)
    if not functions:
        return None
    strategy = BatchStrategy(model.name, module.__name__, functions)
    strategy.initialize(model)
    return strategy


def _find(config: ModelConfig, model: Model) -> Path | None:
    """The file named in the configuration, else the first one in the version, model and backend directories."""
    if PATH_PARAMETER in config.parameters:
        if config.HasField("sequence_batching"):
            raise invalid_argument(
                f"{PATH_PARAMETER} cannot be specified with sequence batcher, using default batching strategy"
            )
        return _named(config.parameters[PATH_PARAMETER].string_value, model)
    if not config.HasField("dynamic_batching"):
        return None
    for directory in _directories(model):
        for name in (LIBRARY_NAME, MODULE_NAME):
            if (directory / name).is_file():
                return directory / name
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
    return path


def _functions(module: ModuleType | CompiledStrategy, path: Path, model: str) -> dict[str, Callable[..., Any]]:
    """All five functions, or none at all, which Triton permits too."""
    functions = {name: function for name in FUNCTIONS if callable(function := getattr(module, name, None))}
    if functions and len(functions) < len(FUNCTIONS):
        raise invalid_argument(f"{path} does not define all required custom batching functions for model {model}")
    return functions


BatchKey = tuple[tuple[str, tuple[int, ...] | None], ...]


class EqualInputs:
    """Decides which requests may share a batch, that is, can be concatenated along the batch dimension. Inputs with
    variable dimensions and without `allow_ragged_batch` must have equal shapes. If there are optional inputs, the same
    ones must be present."""

    def __init__(self, config: ModelConfig) -> None:
        self._of_equal_shape = frozenset(
            tensor.name for tensor in config.input if -1 in tensor.dims and not tensor.allow_ragged_batch
        )
        self._has_optional = any(tensor.optional for tensor in config.input)

    def key(self, request: QueuedRequest) -> BatchKey:
        """Equal for requests that may share a batch."""
        if not self._of_equal_shape and not self._has_optional:
            return ()
        return tuple(
            (name, tensor.shape[1:] if name in self._of_equal_shape else None)
            for name, tensor in request.inputs.items()  # sorted by name by the request validator
            if name in self._of_equal_shape or self._has_optional
        )


@dataclass(slots=True)
class _Prefix:
    """The requests at the front of the queue that fit into one batch."""

    count: int = 0
    """Requests."""
    rows: int = 0
    preferred_count: int = 0
    """Requests in the best preferred size; 0 = none."""
    is_full: bool = False
    """Whether the batch cannot grow."""
    oldest_ns: int = 0
    """When its oldest request was queued (monotonic)."""

    def add(self, request: QueuedRequest, rows: int) -> None:
        self.rows += rows
        self.count += 1
        # With priorities, the first request is not always the oldest.
        self.oldest_ns = min(self.oldest_ns or request.batcher_start_ns, request.batcher_start_ns)


class DynamicBatcher(RequestQueue):
    """The queue of a model with dynamic batching.

    A batch has at most max_batch_size rows, unless a single request has more. It exceeds the largest preferred size
    only if its oldest request has waited for max_queue_delay. An instance forms its batch when it becomes free, so a
    batch can grow until then; `optimization.eager_batching` therefore has no effect.
    """

    def __init__(
        self, config: ModelConfig, statistics: Statistics, timer: Timer, strategy: BatchStrategy | None = None
    ) -> None:
        batching = config.dynamic_batching
        super().__init__(QueuePolicies.of(batching), statistics, timer)
        self._equal_inputs = EqualInputs(config)
        self._strategy = strategy
        self._preferred = frozenset(batching.preferred_batch_size)
        self._most_rows = max(config.max_batch_size, 1)
        self._largest_preferred = max(self._preferred, default=self._most_rows)
        self._max_delay_ns = batching.max_queue_delay_microseconds * 1000

    def enqueue(self, request: QueuedRequest) -> None:
        request.batch_key = self._equal_inputs.key(request)
        super().enqueue(request)

    def _ready_count(self) -> tuple[int, float | None]:
        prefix = self._prefix()
        waited_ns = time.monotonic_ns() - prefix.oldest_ns
        is_late = 0 < self._max_delay_ns <= waited_ns
        if prefix.preferred_count and not is_late:
            return prefix.preferred_count, None
        if prefix.is_full or is_late or not self._max_delay_ns or self._stopped:
            return prefix.count, None
        return 0, min((self._max_delay_ns - waited_ns) / 1e9, MAX_SLEEP_S)

    def _prefix(self) -> _Prefix:
        if self._strategy is None:
            return self._longest_prefix(None)
        with self._strategy.new_batch() as include:
            return self._longest_prefix(include)

    def _longest_prefix(self, include: Include | None) -> _Prefix:
        prefix, first = _Prefix(), None
        for request in self._queue:
            rows = max(request.batch_size, 1)
            first = first or request
            if prefix.count:
                if prefix.rows + rows > self._largest_preferred and not prefix.preferred_count:
                    prefix.preferred_count = prefix.count  # as close as possible to a preferred size
                if prefix.rows + rows > self._most_rows or request.batch_key != first.batch_key:
                    prefix.is_full = True
                    break
            # If the strategy refuses the first request, it is executed alone; otherwise it would block the queue.
            if include is not None and not include(request) and prefix.count:
                prefix.is_full = True
                break
            prefix.add(request, rows)
            if prefix.rows in self._preferred:
                prefix.preferred_count = prefix.count
        prefix.is_full |= prefix.rows >= self._largest_preferred
        return prefix
