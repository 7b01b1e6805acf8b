"""The instances of one model version and the threads that run them: made, brought into service, changed, taken away.

For: Model. Does not know: requests, why instances change. Invariants: an instance is served by one thread, a passive
one by none; it is known to the rate limiter as long as it serves; a change that fails leaves the others as they were.
The set does not hold the model, so that a model that is over is gone at once, with the directory that was made for it.
Source: TritonModelInstance and TritonBackendThread in Triton's core (reference §2.2).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from llmbackend.core.backend_api import ExecutionPolicy, InstanceGroupKind
from llmbackend.core.backend_manager import LoadedBackend
from llmbackend.core.scheduling.rate_limiter import RateLimiter
from llmbackend.core.scheduling.scheduler import ElasticSource, Scheduler
from llmbackend.core.scheduling.sequences.sequence_batcher import SequenceBatcher

from .instance_update import InstanceChange, InstanceRemovals, compare, remove, undoing
from .live_requests import LiveRequests
from .model_instance import InstanceThread, LoadedInstance
from .warmup import WarmupSample, warm_up

if TYPE_CHECKING:
    from .model import LoadedModel

log = logging.getLogger(__name__)


Samples = Callable[[], Sequence[WarmupSample]]
"""What an instance executes before its first request."""


def new_instances(model: LoadedModel, config: ModelConfig) -> tuple[LoadedInstance, ...]:
    """`count` on each GPU of a group, or `count`. Those of different GPUs share their names, as in Triton."""
    instances = []
    for group in config.instance_group:
        kind = InstanceGroupKind(ModelInstanceGroup.Kind.Name(group.kind))
        for index, device_id in itertools.product(range(group.count), group.gpus or [0]):
            instances.append(LoadedInstance(model, f"{group.name}_{index}", kind, device_id, group))
    return tuple(instances)


class InstanceSet:
    """`create` and `start` it; then `add` and `settle` any number of changes; `stop` and `finalize` it at the end."""

    def __init__(self, model: str, backend: LoadedBackend, rate_limiter: RateLimiter, live: LiveRequests) -> None:
        """model: its name. live: the requests that may be with an instance."""
        self.all: tuple[LoadedInstance, ...] = ()
        self._model = model
        self._backend = backend
        self._rate_limiter = rate_limiter
        self._live = live
        self._threads: list[InstanceThread] = []
        self._removals = InstanceRemovals()

    @property
    def are_elastic(self) -> bool:
        """Whether they may change: each instance has a thread of its own, at a scheduler that lets it go."""
        blocking = self._backend.execution_policy is ExecutionPolicy.BLOCKING
        return blocking and all(isinstance(thread.source, ElasticSource) for thread in self._threads)

    @property
    def removal_count(self) -> int:
        """Removed instances that still run."""
        return len(self._removals)

    def create(self, instances: Sequence[LoadedInstance]) -> None:
        """Initialises them. Raises TritonError; `finalize` must follow then, too."""
        self.all = tuple(instances)
        self._initialize(self.all)

    def start(self, scheduler: Scheduler, samples: Samples) -> None:
        """Begins to take batches from `scheduler`, when every instance is warm.

        Raises TritonError when a warmup failed, or an instance needs more than the rate limiter has."""
        self._start_threads(self.all, scheduler, samples)

    def add(self, wanted: Sequence[LoadedInstance], scheduler: Scheduler, samples: Samples) -> InstanceChange:
        """Brings into service those that are wanted and not there, beside the others.

        Raises TritonError when a new one fails; then nothing has changed."""
        change = compare(self.all, wanted)
        undoing(change.added, lambda: self._initialize(change.added))
        try:
            self._start_threads(change.added, scheduler, samples)
        except BaseException:
            self._remove(change.added)
            raise
        return change

    def settle(self, change: InstanceChange) -> None:
        """Ends a change that `add` began: instances that are not wanted any more take no further batch."""
        self.all = (*change.kept, *change.added)
        self._remove(change.removed)

    def check_ready(self) -> None:
        """Raises the TritonError of an instance that is not ready."""
        for instance in self.all:
            if instance in self.all:  # not removed since
                instance.check_ready()

    def stop(self) -> None:
        """Returns when no instance runs. The scheduler was stopped before."""
        for instance in self.all:
            self._rate_limiter.unregister(instance)
        for thread in self._threads:
            thread.join()
        self._removals.join()

    def finalize(self) -> None:
        """After `stop`."""
        for instance in self.all:
            instance.finalize()
        self.all = ()
        self._threads = []

    def _initialize(self, instances: Sequence[LoadedInstance]) -> None:
        """Initialises every instance even when one fails; the last error wins, as in Triton."""
        workers = len(instances) if self._backend.attributes().parallel_instance_loading else 1
        with ThreadPoolExecutor(max(workers, 1), thread_name_prefix=f"load-{self._model}") as pool:
            futures = [pool.submit(instance.initialize) for instance in instances]
            errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            log.error("ERROR: Failed to create instance: %s", error)
        if errors:
            raise errors[-1]

    def _start_threads(self, instances: Sequence[LoadedInstance], scheduler: Scheduler, samples: Samples) -> None:
        warm = partial(warm_up, samples())
        groups = self._thread_groups(instances, isinstance(scheduler, SequenceBatcher))
        for instance in itertools.chain(*groups):
            self._rate_limiter.register(instance)
        for group in groups:
            source = scheduler.source(group[0].name)
            thread = InstanceThread(group, source, self._rate_limiter.source(group, source), warm)
            thread.start()
            self._threads.append(thread)
        for thread in self._threads:
            thread.warmed_up.result()
        for thread in self._threads[-len(groups) :] if groups else ():
            if isinstance(thread.source, ElasticSource):
                thread.source.admit()

    def _thread_groups(self, instances: Sequence[LoadedInstance], has_sequences: bool) -> list[list[LoadedInstance]]:
        """Which instances share a thread: those of one GPU under DEVICE_BLOCKING, otherwise none, and none of a model
        with sequences, which belong to one instance. Passive ones have no thread."""
        groups: dict[object, list[LoadedInstance]] = {}
        blocking = self._backend.execution_policy is ExecutionPolicy.DEVICE_BLOCKING
        if blocking and has_sequences:
            log.warning("model '%s': DEVICE_BLOCKING is ignored for a model with sequences", self._model)
            blocking = False
        for instance in instances:
            if not instance.is_passive:
                shared = blocking and instance.kind is InstanceGroupKind.GPU
                groups.setdefault(instance.device_id if shared else instance, []).append(instance)
        return list(groups.values())

    def _remove(self, instances: Sequence[LoadedInstance]) -> None:
        """Those that have nothing to do are finalised when it returns, the others when they are done."""
        idle = [removal for instance in instances if (removal := self._begin_removal(instance)) is not None]
        for removal in idle:
            removal.join()

    def _begin_removal(self, instance: LoadedInstance) -> threading.Thread | None:
        """The thread that removes it, if it will not be long."""
        thread = next((one for one in self._threads if one.serves(instance)), None)
        is_busy = False
        if thread is not None:
            self._threads.remove(thread)
            assert isinstance(thread.source, ElasticSource), "are_elastic comes first"
            is_busy = thread.source.dismiss(thread.thread)
        if not is_busy:
            self._rate_limiter.unregister(instance)
            is_busy = bool(self._live.with_instance(instance))
        removal = self._removals.begin(partial(self._finish_removal, instance, thread))
        return None if is_busy else removal

    def _finish_removal(self, instance: LoadedInstance, thread: InstanceThread | None) -> None:
        remove(instance, thread, self._live)
        self._rate_limiter.unregister(instance)
