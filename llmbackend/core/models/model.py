"""One version of a model: the shell around the backend's model, its instances, scheduler and statistics.

For: the life cycle (load, finalise) and the server (infer). Does not know: other versions, repositories, protocols.
Invariants: what was initialised is finalised, in reverse order, once, also when a later step of the load failed;
every request in this model counts in `in_flight` until its last handle is gone. Source: backend API contract §2.1,
§2.2, §2.10.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.backend_api import SendPolicy
from llmbackend.core.backend_manager import LoadedBackend
from llmbackend.core.descriptions import Description
from llmbackend.core.host_services import HostServices
from llmbackend.core.inner_door import InnerDoor
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.metrics.latencies import Latencies
from llmbackend.core.metrics.metric_tags import metric_tags
from llmbackend.core.repository.model_repository import ModelSpec
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.requests.reaper import Reaper
from llmbackend.core.requests.request_validation import RequestValidator
from llmbackend.core.requests.response_channel import ResponseChannel
from llmbackend.core.requests.responses import Responses
from llmbackend.core.scheduling.batch_strategy import BatchStrategy, load_strategy
from llmbackend.core.scheduling.factory import new_scheduler
from llmbackend.core.scheduling.scheduler import Scheduler
from llmbackend.core.scheduling.sequences.sequence_batcher import SequenceBatcher
from llmbackend.core.statistics import Statistics

from .in_flight import InFlight
from .instance_set import InstanceSet, new_instances
from .live_requests import LiveRequests
from .model_instance import LoadedInstance
from .readiness import Readiness
from .served_config import ServedConfig
from .warmup import WarmupSample, warmup_samples

log = logging.getLogger(__name__)


class LoadedModel(InnerDoor):
    """A model version as the backend sees it (backend_api.Model). `load` it, then `infer`, then `finalize`."""

    def __init__(
        self,
        spec: ModelSpec,
        version: int,
        backend: LoadedBackend,
        services: HostServices,
        auto_complete_config: bool,
    ) -> None:
        super().__init__(services.host)
        self.state: Any = None
        self.name = spec.name
        self.key = spec.key
        self.namespace = spec.namespace
        self.version = version
        self.backend = backend
        self.directory = spec.directory
        self.version_directory = spec.directory / str(version)
        self.auto_complete_config = auto_complete_config
        self.statistics = Statistics()
        self.metric_tags = metric_tags(spec.config)
        self.latencies: Latencies  # from `load` on
        self.in_flight = InFlight()
        self.live = LiveRequests()
        self.answers_decoupled = False  # what it does, from `load` on
        self.description: Description  # from `load` on
        self._services = services
        self._instances = InstanceSet(self.name, backend, services.rate_limiter, self.live)
        self._readiness = Readiness(self.name, version)
        self.spec = spec  # keeps a directory that was made for this model alive
        self._config = ServedConfig(spec.config, backend, services.gpus, auto_complete_config)
        self._scheduler: Scheduler | None = None
        self._strategy: BatchStrategy | None = None
        self._validator: RequestValidator | None = None
        self._responses: Responses | None = None

    @property
    def reaper(self) -> Reaper:
        return self._services.reaper

    @property
    def may_block_in_send(self) -> bool:
        return self.backend.send_policy is SendPolicy.BLOCKING

    @property
    def config(self) -> ModelConfig:
        """A copy, which the caller may change. What each request needs of it is in `description`."""
        return self._config.copy()

    def set_config(self, config: ModelConfig) -> None:
        """Raises TritonError UNSUPPORTED outside of ModelInitialize, or when auto-complete is off."""
        self._config.complete(config)

    def load(self) -> None:
        """Initialises model and instances and starts serving. Raises TritonError after undoing what was done."""
        start_s = time.monotonic()
        try:
            self._config.complete_instance_groups()
            with self._config.open():
                self.backend.entry_points.call("ModelInitialize", self)
            self._config.check()
            self._start_serving(self._config.current)
        except BaseException:
            self.finalize()
            raise
        self.statistics.load_duration_s = time.monotonic() - start_s

    @property
    def instances(self) -> tuple[LoadedInstance, ...]:
        return self._instances.all

    @property
    def is_elastic(self) -> bool:
        """Whether `update_instances` can be used."""
        return self._instances.are_elastic

    @property
    def removal_count(self) -> int:
        """Removed instances that still run."""
        return self._instances.removal_count

    def update_instances(self, spec: ModelSpec) -> None:
        """Adds and removes instances until they are those of `spec`; the others serve on. The caller keeps the model
        from being finalised.

        Raises TritonError when a new one fails; then nothing has changed."""
        assert self._scheduler is not None, "load() comes first"
        config = self._config.with_instances_of(spec.config)
        change = self._instances.add(new_instances(self, config), self._scheduler, self._warmup_samples)
        self.spec, self._config.current = spec, config
        self._instances.settle(change)

    def infer(self, message: InferenceRequest) -> ResponseChannel:
        """Validates and enqueues. The caller has entered `in_flight` for the request; it leaves with its last handle.

        Raises TritonError when refused; then the callback is never called and `in_flight` is left.
        """
        assert self._validator and self._scheduler is not None and self._responses, "load() comes first"
        try:
            valid = self._validator.validate(message)
        except BaseException:
            self.leave()
            raise
        message = self._responses.around(message)
        channel = ResponseChannel(message, self)
        self.live.add(channel)
        request = InferRequest(message, channel, valid.inputs, valid.requested_outputs, valid.batch_size)
        try:
            self._scheduler.enqueue(request)
        except BaseException:
            channel.withdraw()
            request.release()
            raise
        return channel

    @property
    def sequences(self) -> SequenceBatcher | None:
        """The scheduler, for a model with sequences."""
        return self._scheduler if isinstance(self._scheduler, SequenceBatcher) else None

    def request_done(self, channel: ResponseChannel) -> None:
        self.live.discard(channel)
        self.leave()

    def leave(self) -> None:
        """Gives up one in-flight handle; the last one checks that nothing is left behind."""
        entered = self.in_flight.leave()
        if entered is None:
            return
        left = {what: count for what, count in self.left_behind().items() if count}
        if left and self.in_flight.is_idle_since(entered):
            self._services.breaches.report(self.name, self.version, left)

    def left_behind(self) -> dict[str, int]:
        """Counts that are 0 whenever no request is in flight."""
        return {
            "requests pending in its statistics": self.statistics.pending_count,
            **(self._scheduler.left_behind() if self._scheduler is not None else {}),
            "requests in its registry": len(self.live),
            "request ids in its registry": self.live.id_count,
        }

    def not_ready_reason(self) -> str:
        """What the backend says of its instances (ModelInstanceReady); "" = ready. Takes seconds at most."""
        if not self.backend.entry_points.has("ModelInstanceReady"):
            return ""
        return self._readiness.reason(self._instances.check_ready)

    def finalize(self) -> None:
        """Stops the instance threads, then finalises instances and model. The caller has waited for `in_flight`."""
        self._readiness.close()
        if self._scheduler is not None:
            self._scheduler.stop()
        self._instances.stop()
        if self._strategy is not None:
            self._strategy.finalize()
            self._strategy = None
        self._instances.finalize()
        self.backend.entry_points.finalize("ModelFinalize", self)
        self._services.breaches.forget(self.name, self.version)

    def _start_serving(self, config: ModelConfig) -> None:
        """Everything between a model that is initialised and its first request."""
        self.latencies = Latencies(config, self._services.metrics)
        self.statistics.summaries = self.latencies.summaries
        self._responses = Responses(config, self.directory, self.latencies.first_response)
        self._strategy = load_strategy(self)
        self._instances.create(new_instances(self, config))
        self._validator = RequestValidator(config)
        self.answers_decoupled = config.model_transaction_policy.decoupled
        self.description = Description.of(self.name, config, self.version_directory)
        self._scheduler = new_scheduler(config, self, self.directory, self._services, self._strategy)
        self._instances.start(self._scheduler, self._warmup_samples)

    def _warmup_samples(self) -> list[WarmupSample]:
        assert self._validator is not None
        return warmup_samples(self._config.current, self.directory, self._validator)
