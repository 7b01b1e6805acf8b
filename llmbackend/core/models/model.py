"""One version of a model: the shell around the backend's model, its instances, scheduler and statistics.

For: the life cycle (load, finalise) and the server (infer). Does not know: other versions, repositories, protocols.
Invariants: what was initialised is finalised, in reverse order, once, also when a later step of the load failed;
every request in this model counts in `in_flight` until its last handle is gone. Source: backend API contract §2.1,
§2.2, §2.10.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from llmbackend.core.backend_api import ExecutionPolicy, InstanceGroupKind
from llmbackend.core.backend_manager import LoadedBackend
from llmbackend.core.config.model_config import merge_auto_complete, set_instance_groups
from llmbackend.core.config.model_config_rules import validate_config, validate_instance_groups, warn_of_ignored_fields
from llmbackend.core.config.tensor_rules import validate_tensors
from llmbackend.core.errors import ErrorCode, TritonError, unsupported
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
from llmbackend.core.scheduling.scheduler import ElasticSource, Scheduler
from llmbackend.core.scheduling.sequences.sequence_batcher import SequenceBatcher
from llmbackend.core.statistics import Statistics

from .in_flight import InFlight
from .instance_update import InstanceRemovals, compare, undoing
from .live_requests import LiveRequests
from .model_instance import InstanceThread, LoadedInstance
from .readiness import Readiness
from .warmup import warm_up, warmup_samples

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
        self.instances: list[LoadedInstance] = []
        self._services = services
        self._readiness = Readiness(self.name, version)
        self.spec = spec  # keeps a directory that was made for this model alive
        self._config = ModelConfig()
        self._config.CopyFrom(spec.config)
        self._config.runtime = self._config.runtime or backend.runtime
        self._initializing = False
        self._threads: list[InstanceThread] = []
        self._removals = InstanceRemovals()
        self._scheduler: Scheduler | None = None
        self._strategy: BatchStrategy | None = None
        self._validator: RequestValidator | None = None
        self._responses: Responses | None = None

    @property
    def reaper(self) -> Reaper:
        return self._services.reaper

    @property
    def config(self) -> ModelConfig:
        copy = ModelConfig()
        copy.CopyFrom(self._config)
        return copy

    @property
    def answers_decoupled(self) -> bool:
        return bool(self._config.model_transaction_policy.decoupled)

    def set_config(self, config: ModelConfig) -> None:
        """Raises TritonError UNSUPPORTED outside of ModelInitialize, or when auto-complete is off."""
        if not self._initializing or not self.auto_complete_config:
            raise unsupported(f"the configuration of model '{self.name}' can only be set in ModelInitialize")
        merge_auto_complete(self._config, config)

    def load(self) -> None:
        """Initialises model and instances and starts serving. Raises TritonError after undoing what was done."""
        start_s = time.monotonic()
        attributes = self.backend.attributes()
        try:
            self._complete_instance_groups(self._config)
            self._initialize_model()
            validate_config(self._config)
            validate_tensors(self._config)
            warn_of_ignored_fields(self._config)
            self.latencies = Latencies(self._config, self._services.metrics)
            self.statistics.summaries = self.latencies.summaries
            self._responses = Responses(self._config, self.directory, self.latencies.first_response)
            self._strategy = load_strategy(self)
            self.instances = self._new_instances(self._config)
            self._initialize_instances(self.instances, attributes.parallel_instance_loading)
            self._start_serving()
        except BaseException:
            self.finalize()
            raise
        self.statistics.load_duration_s = time.monotonic() - start_s

    @property
    def is_elastic(self) -> bool:
        """Whether `update_instances` can be used: each instance has a thread of its own, at a scheduler that lets it
        go."""
        blocking = self.backend.execution_policy is ExecutionPolicy.BLOCKING
        return blocking and all(isinstance(thread.source, ElasticSource) for thread in self._threads)

    @property
    def removal_count(self) -> int:
        """Removed instances that still run."""
        return len(self._removals)

    def update_instances(self, spec: ModelSpec) -> None:
        """Adds and removes instances until they are those of `spec`; the others serve on. The caller keeps the model
        from being finalised.

        Raises TritonError when a new one fails; then nothing has changed."""
        config = self.config
        del config.instance_group[:]
        config.instance_group.extend(spec.config.instance_group)
        config.version_policy.CopyFrom(spec.config.version_policy)
        attributes = self.backend.attributes()
        self._complete_instance_groups(config)
        change = compare(self.instances, self._new_instances(config))
        parallel = attributes.parallel_instance_loading
        undoing(change.added, lambda: self._initialize_instances(change.added, parallel))
        try:
            self._start_threads(change.added)
        except BaseException:
            self._remove(change.added)
            raise
        self.spec, self._config = spec, config
        self.instances = [*change.kept, *change.added]
        self._remove(change.removed)

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
        """What the backend says of its instances (ModelInstanceReady); "" = ready. Takes a second at most."""
        if not self.backend.entry_points.has("ModelInstanceReady"):
            return ""
        return self._readiness.reason(self._check_ready)

    def finalize(self) -> None:
        """Stops the instance threads, then finalises instances and model. The caller has waited for `in_flight`."""
        self._readiness.close()
        if self._scheduler is not None:
            self._scheduler.stop()
        for instance in self.instances:
            self._services.rate_limiter.unregister(instance)
        for thread in self._threads:
            thread.join()
        self._removals.join()
        if self._strategy is not None:
            self._strategy.finalize()
            self._strategy = None
        for instance in self.instances:
            instance.finalize()
        self.instances = []
        self._threads = []
        self.backend.entry_points.finalize("ModelFinalize", self)
        self._services.breaches.forget(self.name, self.version)

    def _check_ready(self) -> None:
        for instance in self.instances:
            if instance in self.instances:  # not removed since
                instance.check_ready()

    def _initialize_model(self) -> None:
        self._initializing = True
        try:
            self.backend.entry_points.call("ModelInitialize", self)
        finally:
            self._initializing = False

    def _complete_instance_groups(self, config: ModelConfig) -> None:
        """Raises TritonError INVALID_ARG when the host has not what a group asks for."""
        attributes, gpus = self.backend.attributes(), self._services.gpus
        set_instance_groups(config, attributes.preferred_groups, gpus.ids)
        validate_instance_groups(config, gpus.ids, gpus.min_compute_capability)

    def _new_instances(self, config: ModelConfig) -> list[LoadedInstance]:
        """`count` on each GPU of a group, or `count`. Those of different GPUs share their names, as in Triton."""
        instances = []
        for group in config.instance_group:
            kind = InstanceGroupKind(ModelInstanceGroup.Kind.Name(group.kind))
            for index, device_id in itertools.product(range(group.count), group.gpus or [0]):
                instances.append(LoadedInstance(self, f"{group.name}_{index}", kind, device_id, group))
        return instances

    def _initialize_instances(self, instances: Sequence[LoadedInstance], parallel: bool) -> None:
        """Initialises every instance even when one fails; the last error wins, as in Triton."""
        workers = len(instances) if parallel else 1
        with ThreadPoolExecutor(max(workers, 1), thread_name_prefix=f"load-{self.name}") as pool:
            futures = [pool.submit(instance.initialize) for instance in instances]
            errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            log.error("ERROR: Failed to create instance: %s", error)
        if errors:
            raise errors[-1]

    def _start_serving(self) -> None:
        self._validator = RequestValidator(self._config)
        self._scheduler = new_scheduler(self._config, self, self.directory, self._services, self._strategy)
        self._start_threads(self.instances)

    def _start_threads(self, instances: Sequence[LoadedInstance]) -> None:
        """Returns when every instance is warm; raises the error of one whose warmup failed, or that needs more than the
        rate limiter has."""
        assert self._scheduler is not None and self._validator is not None
        samples = warmup_samples(self._config, self.directory, self._validator)
        limiter = self._services.rate_limiter
        groups = self._thread_groups(instances)
        for instance in itertools.chain(*groups):
            limiter.register(instance)
        for group in groups:
            source = self._scheduler.source(group[0].name)
            thread = InstanceThread(group, source, limiter.source(group, source), partial(warm_up, samples))
            thread.start()
            self._threads.append(thread)
        for thread in self._threads:
            thread.warmed_up.result()

    def _remove(self, instances: Sequence[LoadedInstance]) -> None:
        threads = [thread for thread in self._threads if thread.serves_any(instances)]
        self._threads = [thread for thread in self._threads if thread not in threads]
        for thread in threads:
            assert isinstance(thread.source, ElasticSource), "is_elastic comes first"
            thread.source.dismiss(thread.thread)
        for instance in instances:
            self._services.rate_limiter.unregister(instance)
        if instances:
            self._removals.begin(instances, threads, self.live)

    def _thread_groups(self, instances: Sequence[LoadedInstance]) -> list[list[LoadedInstance]]:
        """Which instances share a thread: those of one GPU under DEVICE_BLOCKING, otherwise none, and none of a model
        with sequences, which belong to one instance. Passive ones have no thread."""
        groups: dict[object, list[LoadedInstance]] = {}
        blocking = self.backend.execution_policy is ExecutionPolicy.DEVICE_BLOCKING
        if blocking and self._config.HasField("sequence_batching"):
            log.warning("model '%s': DEVICE_BLOCKING is ignored for a model with sequences", self.name)
            blocking = False
        for instance in instances:
            if not instance.is_passive:
                shared = blocking and instance.kind is InstanceGroupKind.GPU
                groups.setdefault(instance.device_id if shared else instance, []).append(instance)
        return list(groups.values())


def as_triton_error(error: BaseException) -> TritonError:
    """Any exception as one that a client may read."""
    if isinstance(error, TritonError):
        return error
    return TritonError(f"{type(error).__name__}: {error}", ErrorCode.INTERNAL)
