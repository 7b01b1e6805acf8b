"""The scheduler of an ensemble: its requests are not queued for instances but run as a flow through other models.

For: LoadedModel of a configuration with `ensemble_scheduling`. Does not know: backends. Invariants: an ensemble's
request never counts as pending (the requests of its steps do); a request also ends when a composing model was unloaded
after the ensemble was loaded.
Source: EnsembleScheduler in Triton's ensemble_scheduler.cc.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.errors import TritonError, request_tag, unavailable
from llmbackend.core.metrics.statistics import FailureReason
from llmbackend.core.model_to_model import ModelHandle, ModelHost
from llmbackend.core.requests.queued_request import QueuedRequest
from llmbackend.core.scheduling.scheduler import BatchSource

from .graph import EnsembleGraph, ModelKey, ModelShapes
from .run import EnsembleRun
from .steps import StepLauncher, StepLimit


class EnsembleScheduler:
    def __init__(self, config: ModelConfig, host: ModelHost) -> None:
        self._graph = EnsembleGraph(config)
        self._host = host
        self._lock = threading.Lock()
        self._shapes: WeakKeyDictionary[ModelHandle, ModelShapes] = WeakKeyDictionary()
        self._runs: set[EnsembleRun] = set()
        self._stopped = False
        self._launcher = StepLauncher(config.name)
        self._limits: list[StepLimit] = []
        if max_running := self._graph.max_inflight_requests:
            subject = f"[Internal Error] Ensemble '{config.name}' step"
            self._limits = [StepLimit(max_running, f"{subject} {step.index}") for step in self._graph.steps]

    def __len__(self) -> int:
        """Requests that are not over; when there is none, also what a limit still counts."""
        return len(self._runs) or sum(len(limit) for limit in self._limits)

    def enqueue(self, request: QueuedRequest) -> None:
        request.queue_start_ns = time.monotonic_ns()
        if self._stopped:
            raise unavailable(
                f"{request_tag(request.id)}Server is stopping, scheduler for model has stopped accepting new "
                f"inference requests"
            )
        try:
            models = self._acquire_models()
        except TritonError as error:
            request.fail(error.copy(f"in ensemble '{self._graph.name}', "), FailureReason.OTHER)
            return
        shapes = {key: self._shapes_of(model) for key, model in models.items()}
        run = EnsembleRun(self._graph, request, models, shapes, self._limits, self._launcher, self._forget)
        with self._lock:
            self._runs.add(run)
        run.start()

    def source(self) -> BatchSource:
        raise AssertionError("an ensemble has no instances")

    def leaked_resources(self) -> Mapping[str, int]:
        return {"requests in its flow": len(self)}

    def stop(self) -> None:
        self._stopped = True
        self._launcher.stop()

    def _acquire_models(self) -> dict[ModelKey, ModelHandle]:
        """Every composing model, so that the request ends with the versions it began with."""
        models: dict[ModelKey, ModelHandle] = {}
        try:
            for key in self._graph.models:
                models[key] = self._host.acquire_model(*key)
        except TritonError:
            for acquired in models.values():
                acquired.leave()
            raise
        return models

    def _shapes_of(self, model: ModelHandle) -> ModelShapes:
        with self._lock:
            shapes = self._shapes.get(model)
            if shapes is None:
                shapes = self._shapes[model] = ModelShapes.of(model.config)
            return shapes

    def _forget(self, run: EnsembleRun) -> None:
        with self._lock:
            self._runs.discard(run)
