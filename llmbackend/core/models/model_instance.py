"""One instance of a model, the thread that executes it, and the requests in flight.

Invariants: calls of Execute for one instance do not overlap; if Execute raises, the host completes and releases all
requests of the batch; Finalize is called exactly once, even after a failed Initialize. Source: TritonModelInstance,
TritonBackendThread in Triton's core.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from llmbackend.fork_server.host_policy import HostPolicy, policy_of

from ..activity.hub import ActivityHub, Reporter, Source
from ..activity.messages import (
    MAX_ID_CHARACTERS,
    EventKind,
    InstanceDescription,
    RequestActivity,
    RequestEnd,
    RequestEnded,
    RequestsReceived,
)
from ..backend_api import InstanceGroupKind, MemoryUsage, Model, Request, ResponseFactory
from ..backend_manager import EXECUTE, LoadedBackend
from ..errors import ErrorCode, TritonError, internal, invalid_argument, unsupported
from ..metrics.model_metrics import FailureReason, PhaseTimes
from ..requests.queued_request import BackendResponseFactory, QueuedRequest
from ..requests.response_channel import ChannelOwner, ResponseChannel
from ..scheduling.scheduler import Batches, BatchSource


class InFlight:
    """A count of open handles. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self.count = 0
        self._entered = 0

    def enter(self) -> None:
        with self._changed:
            self.count += 1
            self._entered += 1

    def leave(self) -> int | None:
        """Closes one handle. If it was the last open one, returns how many were ever opened; otherwise None."""
        with self._changed:
            assert self.count > 0, "leave() without enter()"
            self.count -= 1
            if self.count:
                return None
            self._changed.notify_all()
            return self._entered

    def is_idle_since(self, entered: int) -> bool:
        """Whether no handle has been opened since `leave` returned `entered`."""
        with self._changed:
            return self.count == 0 and self._entered == entered

    def wait_for_zero(self, timeout_s: float | None = None) -> bool:
        """Blocks until no handle is open; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self.count == 0, timeout_s)


class LiveRequests:
    """The unfinished requests, also indexed by client id, which need not be unique; the empty id finds nothing. All
    operations are O(1). Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._waiting = 0
        self._channels: set[ResponseChannel] = set()
        self._by_id: dict[str, set[ResponseChannel]] = {}

    def __len__(self) -> int:
        return len(self._channels)

    @property
    def id_count(self) -> int:
        return len(self._by_id)

    def add(self, channel: ResponseChannel) -> None:
        with self._lock:
            self._channels.add(channel)
            if channel.request_id:
                self._by_id.setdefault(channel.request_id, set()).add(channel)

    def discard(self, channel: ResponseChannel) -> None:
        with self._lock:
            self._channels.discard(channel)
            same_id = self._by_id.get(channel.request_id)
            if same_id is not None:
                same_id.discard(channel)
                if not same_id:
                    del self._by_id[channel.request_id]
            if self._waiting:
                self._left.notify_all()

    def wait_until_gone(self, channels: Collection[ResponseChannel]) -> None:
        """Blocks until none of these requests is registered any more."""
        with self._left:
            self._waiting += 1
            self._left.wait_for(lambda: self._channels.isdisjoint(channels))
            self._waiting -= 1

    def all(self) -> list[ResponseChannel]:
        with self._lock:
            return list(self._channels)

    def with_instance(self, instance: object) -> list[ResponseChannel]:
        """Requests that were last given to `instance`."""
        return [channel for channel in self.all() if channel.instance is instance]

    def with_id(self, request_id: str) -> list[ResponseChannel]:
        with self._lock:
            return list(self._by_id.get(request_id, ()))


log = logging.getLogger(__name__)

WATCH = "LLMBACKEND_ModelInstanceWatch"
DESCRIBE = "LLMBACKEND_ModelInstanceDescribe"
MEMORY_USAGE = "LLMBACKEND_ModelInstanceMemoryUsage"


class InstanceOwner(Model, ChannelOwner, Protocol):
    """The model version to which an instance belongs."""

    @property
    def backend(self) -> LoadedBackend: ...
    @property
    def live_requests(self) -> LiveRequests: ...
    @property
    def activity_hub(self) -> ActivityHub: ...
    @property
    def host_policies(self) -> Mapping[str, HostPolicy]: ...
    def enter(self) -> None:
        """Counts one more request in flight, until `request_done`."""


class LoadedInstance:
    """backend_api.ModelInstance, and WatchedInstance for the hub. Instances with equal `signature` are
    interchangeable."""

    def __init__(
        self, model: InstanceOwner, name: str, kind: InstanceGroupKind, device_id: int, group: ModelInstanceGroup
    ) -> None:
        self.state: Any = None
        self.model = model
        self.name = name
        self.kind = kind
        self.device_id = device_id
        self.is_passive = group.passive
        self.host_policy = policy_of(model.host_policies, group.host_policy or _default_policy(kind, device_id))
        if group.host_policy and group.host_policy not in model.host_policies:
            log.warning("instance '%s': --host-policy sets no policy '%s'", name, group.host_policy)
        self.rate_limiter = group.rate_limiter
        self.signature = (kind, device_id, _settings_of(group))
        self._functions = model.backend.functions
        self.source = Source(model.name, str(model.version), name)
        self.activity = Reporter(model.activity_hub, self.source)
        self._is_initialized = False
        self._reports = self._functions.has(WATCH)  # whether the backend reports its own requests

    def initialize(self) -> None:
        """Raises the backend's TritonError; `finalize` must be called even then."""
        self.model.activity_hub.add_instance(self)
        try:
            with self.host_policy.bound():
                self._functions.call("TRITONBACKEND_ModelInstanceInitialize", self)
        except OSError as error:
            raise internal(f"instance '{self.name}' cannot be bound as its host policy says: {error}") from error
        self._is_initialized = True
        self.model.activity_hub.add_instance(self)

    def finalize(self) -> None:
        self.model.activity_hub.remove_instance(self)
        self._is_initialized = False
        self._functions.finalize("TRITONBACKEND_ModelInstanceFinalize", self)

    def watch(self, kinds: frozenset[EventKind]) -> None:
        if self._is_initialized:
            try:
                self._functions.call(WATCH, self, kinds)
            except TritonError as error:
                log.error("instance '%s' cannot be watched: %s", self.name, error.status)

    def describe(self) -> InstanceDescription:
        if not self._is_initialized:
            return InstanceDescription(state="starting")
        if self._functions.has(DESCRIBE):
            try:
                description: InstanceDescription = self._functions.call(DESCRIBE, self)
                return description
            except TritonError as error:
                log.error("instance '%s' cannot be described: %s", self.name, error.status)
        channels = () if self._reports else self.model.live_requests.with_instance(self)
        return InstanceDescription(state="ready", requests=tuple(map(_request_of, channels)))

    def memory_usage(self) -> Sequence[MemoryUsage]:
        """Empty if the backend does not report it."""
        if not self._is_initialized or not self._functions.has(MEMORY_USAGE):
            return ()
        try:
            usage: Sequence[MemoryUsage] = self._functions.call(MEMORY_USAGE, self)
            return usage
        except TritonError as error:
            log.error("failed to get the memory usage of instance '%s': %s", self.name, error.status)
            return ()

    def request_done(self, channel: ResponseChannel) -> None:
        """Called when a request of the instance has ended."""
        if not self._reports:
            reason = "abort" if channel.is_cancelled else ""
            end = RequestEnd(request=channel.number, time=time.time(), finish_reason=reason)
            self.activity.report(RequestEnded(end))

    def check_ready(self) -> None:
        """Raises the backend's TritonError if the instance is not ready."""
        self._functions.call("TRITONBACKEND_ModelInstanceReady", self)

    def kill(self) -> int:
        """Kills the instance's process, and returns its id. Raises the backend's TritonError."""
        if not self._functions.has("LLMBACKEND_ModelInstanceKill"):
            raise unsupported(f"backend '{self._functions.backend}' runs no instance process that could be killed")
        pid: int = self._functions.call("LLMBACKEND_ModelInstanceKill", self)
        log.warning("killed process %d of instance '%s' of model '%s'", pid, self.name, self.model.name)
        return pid

    def execute(self, requests: Sequence[QueuedRequest]) -> None:
        """Calls Execute. Afterwards either the backend owns the requests, or all of them have failed with its error."""
        for request in requests:
            request.channel.instance = self
        if self.activity.kinds and not self._reports:
            self.activity.report(RequestsReceived(tuple(_request_of(request.channel) for request in requests)))
        try:
            self._functions.call(EXECUTE, self, requests)
        except TritonError as error:
            is_cancelled = error.code is ErrorCode.CANCELLED
            for request in requests:
                request.fail(error, FailureReason.CANCELED if is_cancelled else FailureReason.BACKEND)

    def report_statistics(
        self,
        request: Request,
        success: bool,
        exec_start_ns: int,
        compute_start_ns: int,
        compute_end_ns: int,
        exec_end_ns: int,
    ) -> None:
        """Counts the request when its FINAL response is sent. Raises TritonError INVALID_ARG after its release."""
        assert isinstance(request, QueuedRequest)
        if request.is_released:
            raise invalid_argument("statistics of a request must be reported before it is released")
        if not request.collects_statistics:
            return
        times = (exec_start_ns, compute_start_ns, compute_end_ns, exec_end_ns)
        channel, statistics = request.channel, self.model.statistics
        batch_size, queue_start_ns = max(request.batch_size, 1), request.queue_start_ns
        if success and channel.trace is not None:
            channel.trace.computed(*times)

        def count(final_ns: int) -> None:
            if success:
                duration_ns = final_ns - channel.start_ns
                statistics.record_success(batch_size, duration_ns, exec_start_ns - queue_start_ns, times)
                if channel.observer is not None:
                    channel.observer.computed(times)
            else:
                statistics.record_failure(final_ns - channel.start_ns, FailureReason.BACKEND)

        channel.count_when_final(count)

    def report_batch_statistics(
        self, batch_size: int, exec_start_ns: int, compute_start_ns: int, compute_end_ns: int, exec_end_ns: int
    ) -> None:
        times: PhaseTimes = (exec_start_ns, compute_start_ns, compute_end_ns, exec_end_ns)
        self.model.statistics.record_batch(batch_size, times)

    def report_response_statistics(
        self,
        factory: ResponseFactory,
        response_start_ns: int,
        compute_output_start_ns: int,
        response_end_ns: int,
        error: TritonError | None = None,
    ) -> None:
        assert isinstance(factory, BackendResponseFactory)
        if error is not None:
            outcome = "cancel" if error.code is ErrorCode.CANCELLED else "fail"
        else:
            outcome = "success" if compute_output_start_ns > 0 else "empty_response"
        index = next(factory.channel.response_indices)
        self.model.statistics.record_response(
            index, response_start_ns, compute_output_start_ns, response_end_ns, outcome
        )


class InstanceThread(threading.Thread):
    """Executes batches until its source ends. Serves one instance or, with DEVICE_BLOCKING, all instances on one GPU in
    turn. A daemon thread, because a backend that hangs in Execute must not keep a stopped process alive."""

    def __init__(
        self,
        instances: Sequence[LoadedInstance],
        source: BatchSource,
        batches: Batches,
        warm_up: Callable[[LoadedInstance], None],
    ) -> None:
        """batches: the batches of `source`, possibly filtered by the rate limiter. warm_up: called on the thread for
        each instance before the first batch; if it fails, no batch is taken."""
        super().__init__(name=instances[0].name, daemon=True)
        self.warmed_up: Future[None] = Future()  # completes with the warmup, or with its error
        self.source = source
        self.instances = tuple(instances)
        self._batches = batches
        self._warm_up = warm_up

    def run(self) -> None:
        try:
            self.instances[0].host_policy.bind()
            for instance in self.instances:
                self._warm_up(instance)
        except BaseException as error:
            self.warmed_up.set_exception(error)
            return
        self.warmed_up.set_result(None)
        for instance in itertools.cycle(self.instances):
            batch = self._batches.next_batch()
            if batch is None:
                return
            try:
                instance.execute(batch)
            except Exception:
                log.exception("instance '%s': the host failed to execute a batch", instance.name)
            del batch  # the host must keep no reference, so that requests dropped by the backend are detected


def _request_of(channel: ResponseChannel) -> RequestActivity:
    """The activity of a request whose backend does not report it."""
    age_s = (time.monotonic_ns() - channel.start_ns) * 1e-9
    return RequestActivity(
        request=channel.number,
        id=channel.request_id[:MAX_ID_CHARACTERS],
        key=channel.tenant.key_name,
        received=time.time() - age_s,
    )


def _default_policy(kind: InstanceGroupKind, device_id: int) -> str:
    """The policy of a group that specifies none, as in Triton."""
    return {InstanceGroupKind.GPU: f"gpu_{device_id}", InstanceGroupKind.CPU: "cpu"}.get(kind, "model")


def _settings_of(group: ModelInstanceGroup) -> bytes:
    """The settings of a group other than names, count and devices, for comparison."""
    rest = ModelInstanceGroup()
    rest.CopyFrom(group)
    for field in ("name", "count", "gpus"):
        rest.ClearField(field)
    return bytes(rest.SerializeToString(deterministic=True))
