"""The scheduler of an ensemble: its requests are not queued for instances but run as a flow through other models.

For: LoadedModel of a configuration with `ensemble_scheduling`. Does not know: backends. Owner of the runs. Invariants:
an ensemble's request never counts as pending (the requests of its steps do); a request ends also when a composing model
has gone since. Source: EnsembleScheduler in Triton's ensemble_scheduler.cc.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.errors import TritonError, request_tag, unavailable
from llmbackend.core.inner_door import ModelHost
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.scheduling.scheduler import BatchSource
from llmbackend.core.statistics import FailureReason

from .ensemble_graph import EnsembleGraph, ModelKey
from .ensemble_run import EnsembleRun
from .ensemble_shapes import ModelShapes
from .ensemble_step import ComposingModel
from .step_launcher import StepLauncher
from .step_limit import StepLimit

if TYPE_CHECKING:
    from llmbackend.core.models.model import LoadedModel


class EnsembleScheduler:
    def __init__(self, config: ModelConfig, host: ModelHost) -> None:
        self._graph = EnsembleGraph(config)
        self._host = host
        self._lock = threading.Lock()
        self._shapes: WeakKeyDictionary[LoadedModel, ModelShapes] = WeakKeyDictionary()
        self._runs: set[EnsembleRun] = set()
        self._stopped = False
        most = self._graph.most_inflight
        subject = f"[Internal Error] Ensemble '{config.name}' step"
        self._launcher = StepLauncher(config.name)
        self._limits = [StepLimit(most, f"{subject} {step.index}") for step in self._graph.steps] if most else []

    def __len__(self) -> int:
        """Requests that are not over; when there is none, also what a limit still counts."""
        return len(self._runs) or sum(len(limit) for limit in self._limits)

    def enqueue(self, request: InferRequest) -> None:
        request.queue_start_ns = time.monotonic_ns()
        if self._stopped:
            raise unavailable(
                f"{request_tag(request.id)}Server is stopping, scheduler for model has stopped accepting new "
                f"inference requests"
            )
        try:
            models = self._acquire_models()
        except TritonError as error:
            failed = TritonError(f"in ensemble '{self._graph.name}', {error.message}", error.code)
            request.fail(failed, FailureReason.OTHER)
            return
        run = EnsembleRun(self._graph, request, models, self._limits, self._launcher, self._forget)
        with self._lock:
            self._runs.add(run)
        run.start()

    def source(self, instance: str) -> BatchSource:
        raise AssertionError("an ensemble has no instances")

    def left_behind(self) -> Mapping[str, int]:
        return {"requests in its flow": len(self)}

    def stop(self) -> None:
        self._stopped = True
        self._launcher.stop()

    def _acquire_models(self) -> dict[ModelKey, ComposingModel]:
        """Every composing model, so that the request ends with the versions it began with."""
        models: dict[ModelKey, ComposingModel] = {}
        try:
            for key in self._graph.models:
                model = self._host.acquire_model(*key)
                models[key] = ComposingModel(model, self._shapes_of(model))
        except TritonError:
            for acquired in models.values():
                acquired.leave()
            raise
        return models

    def _shapes_of(self, model: LoadedModel) -> ModelShapes:
        with self._lock:
            shapes = self._shapes.get(model)
            if shapes is None:
                shapes = self._shapes[model] = ModelShapes.of(model.config)
            return shapes

    def _forget(self, run: EnsembleRun) -> None:
        with self._lock:
            self._runs.discard(run)
