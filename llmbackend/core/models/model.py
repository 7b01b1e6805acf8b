"""One version of a model with its instances, scheduler and statistics. Source: TritonModel in Triton's core.

Invariants: everything initialised is finalised exactly once, in reverse order, even after a failed load; a request
counts in `in_flight` until its last handle is dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Timer

from ..backend_api import SendPolicy
from ..backend_manager import LoadedBackend
from ..daemon_threads import DaemonThreadPool
from ..errors import TritonError, unsupported
from ..host_services import HostServices
from ..messages import InferenceHandle, InferenceRequest, LoadParameters, ResponseCallback
from ..metrics.model_metrics import Latencies, Statistics, metric_tags
from ..model_to_model import ModelHost
from ..repository.model_repository import ModelSpec
from ..requests.queued_request import QueuedRequest
from ..requests.request_validation import RequestValidator
from ..requests.response_channel import ChannelOwner, RequestObserver, ResponseChannel
from ..requests.responses import ResponseTransforms
from ..scheduling.caching_scheduler import CachingScheduler
from ..scheduling.dynamic_batcher import BatchStrategy, DynamicBatcher, load_strategy
from ..scheduling.ensembles.run import EnsembleScheduler
from ..scheduling.request_queue import RequestQueue
from ..scheduling.scheduler import ResponseOrder, Scheduler
from ..scheduling.sequences.batcher import SequenceBatcher
from .instance_set import InstanceSet, new_instances
from .model_instance import InFlight, LiveRequests, LoadedInstance
from .served_config import Description, ServedConfig
from .warmup import WarmupSample, warmup_samples

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 6.0


def _answer(question: Future[str], ask: Callable[[], None]) -> None:
    """Sets the result to the reason given by the backend; "" = ready."""
    try:
        ask()
    except TritonError as error:
        question.set_result(error.message or error.status)
    else:
        question.set_result("")


class Readiness:
    """Checks the readiness of one model version, one question at a time. Thread-safe."""

    def __init__(self, name: str, version: int) -> None:
        self._name = name
        self._version = version
        self._lock = threading.Lock()
        self._threads = DaemonThreadPool(f"ready-{name}")
        self._question: Future[str] | None = None
        self._deadline_s = 0.0
        """When the question counts as unanswered."""
        self._logged = ""
        self._closed = False

    def reason(self, ask: Callable[[], None], timeout_s: float | None = None) -> str:
        """Why the version is not ready; "" = it is ready.

        ask: raises TritonError if not ready; called on another thread, and not referenced afterwards
        timeout_s: used if shorter than ANSWER_TIMEOUT_S; exceeding it is not logged as a change
        """
        with self._lock:
            if self._closed:
                return "it is being unloaded"
            if self._question is None or self._question.done():
                question: Future[str] = Future()
                try:
                    self._threads.run(partial(_answer, question, ask))
                except RuntimeError as error:  # no more threads
                    return f"its readiness cannot be checked: {error}"
                self._question, self._deadline_s = question, time.monotonic() + ANSWER_TIMEOUT_S
            question, left_s = self._question, self._deadline_s - time.monotonic()
        wait_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            reason = question.result(max(min(left_s, wait_s), 0.0))
        except TimeoutError:
            reason = f"its backend did not report within {wait_s:g} s whether it is ready"
        if timeout_s is None or question.done():
            self._log_change(reason)
        return reason

    def close(self) -> None:
        """Refuses further questions and waits for the current one, so that no finalised instance is asked."""
        with self._lock:
            self._closed = True
            question, left_s = self._question, self._deadline_s - time.monotonic()
        if question is not None:
            wait((question,), max(left_s, 0.0))
        self._threads.close()

    def _log_change(self, reason: str) -> None:
        with self._lock:
            if reason == self._logged:
                return
            self._logged = reason
        if reason:
            log.warning("model '%s' version %d is not ready: %s", self._name, self._version, reason)
        else:
            log.info("model '%s' version %d is ready again", self._name, self._version)


def new_scheduler(
    config: ModelConfig,
    model: ChannelOwner,
    model_directory: Path,
    services: HostServices,
    strategy: BatchStrategy | None = None,
) -> Scheduler:
    """Raises TritonError INVALID_ARG for an invalid configuration that earlier checks did not detect."""
    scheduler: Scheduler
    if config.HasField("ensemble_scheduling"):
        scheduler = EnsembleScheduler(config, services.host)
    elif config.HasField("sequence_batching"):
        scheduler = SequenceBatcher(config, model, model_directory, services.timer)
    else:
        scheduler = _queue(config, model.statistics, services.timer, strategy)
    if config.response_cache.enable:
        scheduler = _with_cache(scheduler, model, services)
    if config.dynamic_batching.preserve_ordering:
        scheduler = ResponseOrder(scheduler)
    return scheduler


def _queue(config: ModelConfig, statistics: Statistics, timer: Timer, strategy: BatchStrategy | None) -> RequestQueue:
    if not config.HasField("dynamic_batching"):
        return RequestQueue(QueuePolicies(), statistics, timer)
    if config.max_batch_size > 1:
        return DynamicBatcher(config, statistics, timer, strategy)
    return RequestQueue(QueuePolicies.of(config.dynamic_batching), statistics, timer)


def _with_cache(scheduler: Scheduler, model: ChannelOwner, services: HostServices) -> Scheduler:
    cache = services.caches.current
    if cache is None:
        log.warning("model '%s' has 'response_cache', but the server has none (--cache-config)", model.name)
        return scheduler
    return CachingScheduler(scheduler, cache, model)


@dataclass(frozen=True, slots=True)
class _Serving:
    """Created by `load` once the backend has completed the configuration."""

    description: Description
    latencies: Latencies
    validator: RequestValidator
    transforms: ResponseTransforms
    scheduler: Scheduler


class LoadedModel:
    """backend_api.Model for the backend, ModelHandle for others. Call order: `load`, `infer` (repeatedly),
    `finalize`."""

    def __init__(
        self,
        spec: ModelSpec,
        version: int,
        backend: LoadedBackend,
        services: HostServices,
        auto_complete_config: bool,
        starts_instances: bool,
    ) -> None:
        """starts_instances: False = call the backend's `forecast` instead of creating instances; serves no request."""
        self.state: Any = None
        self.name = spec.name
        self.key = spec.key
        self.namespace = spec.namespace
        self.version = version
        self.backend = backend
        self.reaper = services.reaper
        self.activity_hub = services.activity
        self.host_policies = services.host_policies
        self.may_block_in_send = backend.send_policy is SendPolicy.BLOCKING
        self.directory = spec.directory
        self.version_directory = spec.directory / str(version)
        self.auto_complete_config = auto_complete_config
        self.statistics = Statistics()
        self.metric_tags = metric_tags(spec.config)
        self.in_flight = InFlight()
        self.live_requests = LiveRequests()
        self.forecast: Mapping[str, Any] = {}
        self._starts_instances = starts_instances
        self._services = services
        self._host: ModelHost = services.host
        self.instance_set = InstanceSet(self.name, backend, services.rate_limiter, self.live_requests)
        self._readiness = Readiness(self.name, version)
        self.spec = spec  # keeps the model's temporary directory alive
        self._config = ServedConfig(spec.config, backend, services.gpus, auto_complete_config)
        self._strategy: BatchStrategy | None = None
        self._serving: _Serving | None = None

    @property
    def config(self) -> ModelConfig:
        """A copy, which takes time to make; requests read `description` instead."""
        return self._config.copy()

    @property
    def description(self) -> Description:
        return self._loaded.description

    @property
    def latencies(self) -> Latencies:
        return self._loaded.latencies

    @property
    def answers_decoupled(self) -> bool:
        return self._loaded.description.is_decoupled

    @property
    def instances(self) -> tuple[LoadedInstance, ...]:
        return self.instance_set.all

    # --- life -------------------------------------------------------------------------------------------------------

    def set_config(self, config: ModelConfig) -> None:
        """Raises TritonError UNSUPPORTED outside ModelInitialize, or if auto-complete is off."""
        self._config.complete(config)

    def load(self) -> None:
        """Initialises model and instances and starts serving. On failure, finalises everything and raises
        TritonError."""
        start_s = time.monotonic()
        try:
            self._config.complete_instance_groups()
            with self._config.open():
                self.backend.functions.call("TRITONBACKEND_ModelInitialize", self)
            self._config.check()
            self._start_serving(self._config.current)
        except BaseException:
            self.finalize()
            raise
        self.statistics.load_duration_s = time.monotonic() - start_s

    def update_instances(self, spec: ModelSpec) -> None:
        """Adds and removes instances until they match `spec`; the others keep serving. The caller has entered
        `in_flight`. If a new instance fails, raises TritonError and leaves everything unchanged."""
        config = self._config.with_instances_of(spec.config)
        change = self.instance_set.add(new_instances(self, config), self._loaded.scheduler, self._warmup_samples)
        self.spec, self._config.current = spec, config
        self.instance_set.settle(change)

    def not_ready_reason(self, timeout_s: float | None = None) -> str:
        """Why an instance is not ready (ModelInstanceReady); "" = ready. Takes seconds at most, or `timeout_s`."""
        if not self.backend.functions.has("TRITONBACKEND_ModelInstanceReady"):
            return ""
        return self._readiness.reason(self.instance_set.check_ready, timeout_s)

    def finalize(self) -> None:
        """Stops the instance threads, then finalises instances and model. Requires that nothing is `in_flight`."""
        self._readiness.close()
        if self._serving is not None:
            self._serving.scheduler.stop()
        self.instance_set.stop()
        if self._strategy is not None:
            self._strategy.finalize()
            self._strategy = None
        self.instance_set.finalize()
        self.backend.functions.finalize("TRITONBACKEND_ModelFinalize", self)
        self._services.leaks.forget(self.name, self.version)

    # --- requests ---------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        self.in_flight.enter()

    def infer(
        self, request: InferenceRequest, callback: ResponseCallback, observer: RequestObserver | None = None
    ) -> ResponseChannel:
        """Validates and enqueues a request. The caller has entered `in_flight`, which is left when the request's last
        handle is dropped. Raises TritonError if the request is refused; then neither callback nor observer is called,
        and `in_flight` is left."""
        serving = self._serving
        assert serving is not None, "load() comes first"
        try:
            if request.resume is not None and request.resume.deltas and not self.backend.resumes:
                reason = f"model '{self.name}' cannot resume requests"
                raise unsupported(f"the request cannot continue after its responses so far: {reason}")
            valid = serving.validator.validate(request)
        except BaseException:
            self.leave()
            raise
        channel = ResponseChannel(request, serving.transforms.wrap(callback, request), self, observer)
        self.live_requests.add(channel)
        queued = QueuedRequest(request, valid, channel)
        try:
            serving.scheduler.enqueue(queued)
        except BaseException:
            channel.withdraw()
            queued.release()
            raise
        return channel

    @property
    def sequences(self) -> SequenceBatcher | None:
        """The scheduler of a model with sequences, else None."""
        scheduler = self._serving.scheduler if self._serving is not None else None
        return scheduler if isinstance(scheduler, SequenceBatcher) else None

    def request_done(self, channel: ResponseChannel) -> None:
        self.live_requests.discard(channel)
        if self._services.activity.kinds and isinstance(channel.instance, LoadedInstance):
            channel.instance.request_done(channel)
        self.leave()

    def leave(self) -> None:
        """Closes one in-flight handle. Closing the last one checks for leaks."""
        entered = self.in_flight.leave()
        if entered is None:
            return
        left = {what: count for what, count in self.leaked_resources().items() if count}
        if left and self.in_flight.is_idle_since(entered):
            self._services.leaks.report(self.name, self.version, left)

    def leaked_resources(self) -> dict[str, int]:
        """Counts that are 0 whenever no request is in flight."""
        return {
            "requests pending in its statistics": self.statistics.pending_count,
            **(self._serving.scheduler.leaked_resources() if self._serving is not None else {}),
            "requests in its registry": len(self.live_requests),
            "request ids in its registry": self.live_requests.id_count,
        }

    # --- other models: backend_api.Model ----------------------------------------------------------------------------

    def infer_async(self, request: InferenceRequest, callback: ResponseCallback) -> InferenceHandle:
        if request.trace is not None:
            request = replace(request, trace=request.trace.child())
        return self._host.acquire_model(request.model_name, request.model_version).infer(request, callback)

    def is_decoupled(self, name: str, version: int = -1) -> bool:
        model = self._host.acquire_model(name, version)
        try:
            return model.answers_decoupled
        finally:
            model.leave()

    def is_model_ready(self, name: str, version: int = -1) -> bool:
        return self._host.model_is_ready(name, version)

    def load_model(self, name: str, parameters: LoadParameters | None = None) -> None:
        self._host.load_model(name, parameters)

    def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        self._host.unload_model(name, unload_dependents)

    # --- loading -----------------------------------------------------------------------------------------------------

    @property
    def _loaded(self) -> _Serving:
        assert self._serving is not None, "load() comes first"
        return self._serving

    def _start_serving(self, config: ModelConfig) -> None:
        latencies = Latencies(config, self._services.metrics)
        self.statistics.summaries = latencies.summaries
        transforms = ResponseTransforms(config, self.directory, latencies.first_response)
        self._strategy = load_strategy(self)
        if self._starts_instances:
            self.instance_set.create(new_instances(self, config))
        else:
            self.forecast = self.backend.functions.call("LLMBACKEND_ModelForecast", self) or {}
        self._serving = _Serving(
            Description.of(self.name, config, self.version_directory),
            latencies,
            RequestValidator(config),
            transforms,
            new_scheduler(config, self, self.directory, self._services, self._strategy),
        )
        self.instance_set.start(self._serving.scheduler, self._warmup_samples)

    def _warmup_samples(self) -> list[WarmupSample]:
        return warmup_samples(self._config.current, self.directory, self._loaded.validator)
