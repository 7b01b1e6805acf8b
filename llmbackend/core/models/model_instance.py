"""One instance of a model and the thread that executes. Source: TritonModelInstance, TritonBackendThread in Triton's
core.

For: InstanceSet and warmup. Does not know: queue policies, repositories. Invariants: Execute is never called twice at
once for one instance; after Execute raised, the host completes and releases every request of the batch; Finalize is
called exactly once, also after a failed Initialize.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from llmbackend.core.backend_api import InstanceGroupKind, Model, Request, ResponseFactory
from llmbackend.core.backend_manager import LoadedBackend
from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument
from llmbackend.core.metrics.statistics import FailureReason, PhaseTimes
from llmbackend.core.requests.queued_request import BackendResponseFactory, QueuedRequest
from llmbackend.core.requests.response_channel import ChannelOwner
from llmbackend.core.scheduling.scheduler import Batches, BatchSource

from .in_flight import LiveRequests

log = logging.getLogger(__name__)


class InstanceOwner(Model, ChannelOwner, Protocol):
    """The model version that an instance belongs to."""

    @property
    def backend(self) -> LoadedBackend: ...
    @property
    def live_requests(self) -> LiveRequests: ...
    def enter(self) -> None:
        """Counts one more request in flight; `request_done` counts it out."""


class LoadedInstance:
    """backend_api.ModelInstance. Instances of equal `signature` are interchangeable."""

    def __init__(
        self, model: InstanceOwner, name: str, kind: InstanceGroupKind, device_id: int, group: ModelInstanceGroup
    ) -> None:
        self.state: Any = None
        self.model = model
        self.name = name
        self.kind = kind
        self.device_id = device_id
        self.is_passive = group.passive
        self.rate_limiter = group.rate_limiter
        self.signature = (kind, device_id, _settings_of(group))
        self._functions = model.backend.functions

    def initialize(self) -> None:
        """Raises the backend's TritonError; `finalize` must follow then, too."""
        self._functions.call("ModelInstanceInitialize", self)

    def finalize(self) -> None:
        self._functions.finalize("ModelInstanceFinalize", self)

    def check_ready(self) -> None:
        """Raises the backend's TritonError when the instance is not ready."""
        self._functions.call("ModelInstanceReady", self)

    def execute(self, requests: Sequence[QueuedRequest]) -> None:
        """Calls Execute. On return the backend owns the requests, or all of them have failed with its error."""
        for request in requests:
            request.channel.instance = self
        try:
            self._functions.execute(self, requests)
        except TritonError as error:
            for request in requests:
                request.fail(error, FailureReason.BACKEND)

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


class InstanceThread:
    """Executes batches until its source ends. Serves one instance, or with DEVICE_BLOCKING all instances of one GPU in
    turn."""

    def __init__(
        self,
        instances: Sequence[LoadedInstance],
        source: BatchSource,
        batches: Batches,
        warm_up: Callable[[LoadedInstance], None],
    ) -> None:
        """batches: those of `source`, through the rate limiter
        warm_up: called on the thread for each instance, before any batch; when it fails, no batch is taken
        """
        self.warmed_up: Future[None] = Future()  # ends with the warmup, or with its error
        self.source = source
        self._instances = tuple(instances)
        self.thread = threading.Thread(
            target=partial(_run, instances, batches, warm_up, self.warmed_up), name=instances[0].name
        )
        self.thread.daemon = True  # a backend that hangs in Execute must not keep a stopped process alive

    def serves(self, instance: LoadedInstance) -> bool:
        return instance in self._instances

    def start(self) -> None:
        self.thread.start()

    def join(self) -> None:
        self.thread.join()


def _settings_of(group: ModelInstanceGroup) -> bytes:
    """The settings of a group other than names, count and devices, in a form that can be compared."""
    rest = ModelInstanceGroup()
    rest.CopyFrom(group)
    for field in ("name", "count", "gpus"):
        rest.ClearField(field)
    return bytes(rest.SerializeToString(deterministic=True))


def _run(
    instances: Sequence[LoadedInstance],
    batches: Batches,
    warm_up: Callable[[LoadedInstance], None],
    warmed_up: Future[None],
) -> None:
    try:
        for instance in instances:
            warm_up(instance)
    except BaseException as error:
        warmed_up.set_exception(error)
        return
    warmed_up.set_result(None)
    _serve(instances, batches)


def _serve(instances: Sequence[LoadedInstance], batches: Batches) -> None:
    for instance in itertools.cycle(instances):
        batch = batches.next_batch()
        if batch is None:
            return
        try:
            instance.execute(batch)
        except Exception:
            log.exception("instance '%s': the host failed to execute a batch", instance.name)
        del batch  # a request is lost when the backend holds no reference: the host must hold none
