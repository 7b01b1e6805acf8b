"""One instance of a model: a shell around the backend's instance, its statistics duties, and the thread that executes.

For: Model. Does not know: queues' policies, repositories. Invariants: Execute is never called twice at once for one
instance; after Execute raised, every request of the batch is completed and released by the host; Finalize is called
exactly once, also after a failed Initialize. Source: backend API contract §2.1, §2.2, §2.5, §2.8, §2.9.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from llmbackend.core.backend_api import InstanceGroupKind, Request, ResponseFactory
from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument
from llmbackend.core.requests.infer_request import InferRequest, InferResponseFactory
from llmbackend.core.scheduling.scheduler import Batches, BatchSource
from llmbackend.core.statistics import FailureReason, PhaseTimes

if TYPE_CHECKING:
    from .model import LoadedModel

log = logging.getLogger(__name__)


class LoadedInstance:
    """An instance as the backend sees it (backend_api.ModelInstance). Instances of equal `place` can stand in for each
    other."""

    def __init__(
        self, model: LoadedModel, name: str, kind: InstanceGroupKind, device_id: int, group: ModelInstanceGroup
    ) -> None:
        self.state: Any = None
        self.model = model
        self.name = name
        self.kind = kind
        self.device_id = device_id
        self.is_passive = group.passive
        self.rate_limiter = group.rate_limiter
        self.place = (kind, device_id, _settings_of(group))
        self._entry_points = model.backend.entry_points

    def initialize(self) -> None:
        """Raises the backend's TritonError; `finalize` must follow in any case."""
        self._entry_points.call("ModelInstanceInitialize", self)

    def finalize(self) -> None:
        self._entry_points.finalize("ModelInstanceFinalize", self)

    def check_ready(self) -> None:
        """Raises the backend's TritonError when the instance is not ready."""
        self._entry_points.call("ModelInstanceReady", self)

    def execute(self, requests: Sequence[InferRequest]) -> None:
        """One Execute. On return the backend owns the requests, or all of them have failed with its error."""
        for request in requests:
            request.channel.instance = self
        try:
            self._entry_points.execute(self, requests)
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
        """Counts the request once its FINAL response went. Raises TritonError INVALID_ARG after its release."""
        assert isinstance(request, InferRequest)
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

        channel.when_final(count)

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
        assert isinstance(factory, InferResponseFactory)
        if error is not None:
            outcome = "cancel" if error.code is ErrorCode.CANCELLED else "fail"
        else:
            outcome = "success" if compute_output_start_ns > 0 else "empty_response"
        index = factory.channel.next_response_index()
        self.model.statistics.record_response(
            index, response_start_ns, compute_output_start_ns, response_end_ns, outcome
        )


class InstanceThread:
    """The backend thread: takes batches until there will be no more. Serves one instance, or, for
    DEVICE_BLOCKING, all instances of one device in turn. `warm_up` is called first for each instance, on
    the thread; `warmed_up` says how that went. Where it failed, no request is taken. `batches` come from
    `source`, through the rate limiter if there is one."""

    def __init__(
        self,
        instances: Sequence[LoadedInstance],
        source: BatchSource,
        batches: Batches,
        warm_up: Callable[[LoadedInstance], None],
    ) -> None:
        self.warmed_up: Future[None] = Future()
        self.source = source
        self._instances = tuple(instances)
        self.thread = threading.Thread(
            target=partial(_live, instances, batches, warm_up, self.warmed_up), name=instances[0].name
        )
        self.thread.daemon = True  # a backend that hangs in Execute must not keep a stopped process alive

    def serves(self, instance: LoadedInstance) -> bool:
        return instance in self._instances

    def start(self) -> None:
        self.thread.start()

    def join(self) -> None:
        self.thread.join()


def _settings_of(group: ModelInstanceGroup) -> bytes:
    """What else is set for the instances of a group, beside their names, number and devices."""
    rest = ModelInstanceGroup()
    rest.CopyFrom(group)
    for field in ("name", "count", "gpus"):
        rest.ClearField(field)
    return bytes(rest.SerializeToString(deterministic=True))


def _live(
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
        del batch  # the backend's references alone decide when a request is lost
