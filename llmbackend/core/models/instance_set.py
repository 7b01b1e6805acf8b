"""The instances of one model version and their threads: creation, start, changes while serving, stop.

Invariants: an instance is served by one thread, a passive one by none; a failed change changes nothing; a removed
instance is finalised once its thread and its requests have ended. Source: TritonModelInstance, TritonBackendThread and
UpdateInstanceGroup in Triton's core.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from ..backend_api import ExecutionPolicy, InstanceGroupKind
from ..backend_manager import LoadedBackend
from ..scheduling.rate_limiter import RateLimiter
from ..scheduling.scheduler import ElasticSource, Scheduler
from ..scheduling.sequences.batcher import SequenceBatcher
from .model_instance import InstanceOwner, InstanceThread, LiveRequests, LoadedInstance
from .warmup import WarmupSample, warm_up

log = logging.getLogger(__name__)


Samples = Callable[[], Sequence[WarmupSample]]
"""Makes the warmup samples of an instance."""


@dataclass(frozen=True, slots=True)
class InstanceChange:
    """A change of the set of instances, which becomes kept + added."""

    kept: list[LoadedInstance]
    added: list[LoadedInstance]
    removed: list[LoadedInstance]


def new_instances(model: InstanceOwner, config: ModelConfig) -> tuple[LoadedInstance, ...]:
    """`count` instances on each GPU of a group, or `count` in total without GPUs. As in Triton, instances on different
    GPUs share their names."""
    instances = []
    for group in config.instance_group:
        kind = InstanceGroupKind(ModelInstanceGroup.Kind.Name(group.kind))
        for index, device_id in itertools.product(range(group.count), group.gpus or [0]):
            instances.append(LoadedInstance(model, f"{group.name}_{index}", kind, device_id, group))
    return tuple(instances)


def compare(present: Sequence[LoadedInstance], wanted: Sequence[LoadedInstance]) -> InstanceChange:
    """For each wanted instance, keeps an existing one with the same `signature`, preferably with the same name. As in
    Triton, a different name alone is not a difference."""
    free: defaultdict[object, list[LoadedInstance]] = defaultdict(list)
    for instance in present:
        free[instance.signature].append(instance)
    kept, others, added = [], [], []
    for one in wanted:
        same = next((instance for instance in free[one.signature] if instance.name == one.name), None)
        if same is not None:
            free[one.signature].remove(same)
            kept.append(same)
        else:
            others.append(one)
    for one in others:
        if free[one.signature]:
            kept.append(free[one.signature].pop(0))
        else:
            added.append(one)
    return InstanceChange(kept, added, [*itertools.chain(*free.values())])


class InstanceSet:
    """Call order: `create`, `start`, any number of `add` and `settle`, `stop`, `finalize`. Has no reference to the
    model, so that an unloaded model and its temporary directory are freed immediately."""

    def __init__(self, model: str, backend: LoadedBackend, rate_limiter: RateLimiter, live: LiveRequests) -> None:
        """model: its name. live: the model's requests."""
        self.all: tuple[LoadedInstance, ...] = ()
        self._model = model
        self._backend = backend
        self._rate_limiter = rate_limiter
        self._live = live
        self._threads: list[InstanceThread] = []
        self._removals: set[threading.Thread] = set()  # each finalises one removed instance

    @property
    def are_elastic(self) -> bool:
        """Whether `add` can be used: it requires a thread per instance and a scheduler that can release instances."""
        blocking = self._backend.execution_policy is ExecutionPolicy.BLOCKING
        return blocking and all(isinstance(thread.source, ElasticSource) for thread in self._threads)

    @property
    def removal_count(self) -> int:
        """Removed instances that have not been finalised yet."""
        return sum(thread.is_alive() for thread in tuple(self._removals))

    def create(self, instances: Sequence[LoadedInstance]) -> None:
        """Initialises the instances. Raises the backend's TritonError; `finalize` must be called even then."""
        self.all = tuple(instances)
        self._initialize(self.all)

    def start(self, scheduler: Scheduler, samples: Samples) -> None:
        """Warms up all instances, then starts taking batches from `scheduler`. Raises TritonError if a warmup fails, or
        if an instance needs more resources than the rate limiter has."""
        self._start_threads(self.all, scheduler, samples)

    def add(self, wanted: Sequence[LoadedInstance], scheduler: Scheduler, samples: Samples) -> InstanceChange:
        """Starts the wanted instances that do not exist yet; the others keep serving. `settle` completes the change. If
        a new instance fails, raises TritonError and leaves everything unchanged."""
        change = compare(self.all, wanted)
        try:
            self._initialize(change.added)
        except BaseException:
            for instance in change.added:
                instance.finalize()
            raise
        try:
            self._start_threads(change.added, scheduler, samples)
        except BaseException:
            self._remove(change.added)
            raise
        return change

    def settle(self, change: InstanceChange) -> None:
        """Completes a change begun by `add`: removed instances take no further batches."""
        self.all = (*change.kept, *change.added)
        self._remove(change.removed)

    def check_ready(self) -> None:
        """Raises the TritonError of an instance that is not ready."""
        for instance in self.all:
            if instance in self.all:  # it may have been removed in the meantime
                instance.check_ready()

    def stop(self) -> None:
        """Returns once no instance is running. The scheduler must have been stopped."""
        for instance in self.all:
            self._rate_limiter.unregister(instance)
        for thread in self._threads:
            thread.join()
        for removal in tuple(self._removals):
            removal.join()

    def finalize(self) -> None:
        """Call it after `stop`."""
        for instance in self.all:
            instance.finalize()
        self.all = ()
        self._threads = []

    def _initialize(self, instances: Sequence[LoadedInstance]) -> None:
        """Initialises all instances even if one fails, then raises the last error, as Triton does."""
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
            source = scheduler.source()
            thread = InstanceThread(group, source, self._rate_limiter.limit(group, source), warm)
            thread.start()
            self._threads.append(thread)
        for thread in self._threads:
            thread.warmed_up.result()
        for thread in self._threads[-len(groups) :] if groups else ():
            if isinstance(thread.source, ElasticSource):
                thread.source.admit()

    def _thread_groups(self, instances: Sequence[LoadedInstance], has_sequences: bool) -> list[list[LoadedInstance]]:
        """The instances of each thread. With DEVICE_BLOCKING, instances on one GPU share a thread, except for models
        with sequences, which are bound to an instance. Passive instances have no thread."""
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
        """Finalises idle instances now and busy ones later, each on its own thread."""
        idle = [removal for instance in instances if (removal := self._begin_removal(instance)) is not None]
        for removal in idle:
            removal.join()

    def _begin_removal(self, instance: LoadedInstance) -> threading.Thread | None:
        """Returns the thread that removes the instance; None if it is busy, or removed because no thread can be
        started."""
        thread = next((one for one in self._threads if instance in one.instances), None)
        is_busy = False
        if thread is not None:
            self._threads.remove(thread)
            assert isinstance(thread.source, ElasticSource), "are_elastic comes first"
            is_busy = thread.source.dismiss(thread)
        if not is_busy:
            self._rate_limiter.unregister(instance)
            is_busy = bool(self._live.with_instance(instance))
        self._removals = {removal for removal in self._removals if removal.is_alive()}
        removal = threading.Thread(
            target=self._finish_removal, args=(instance, thread), name="remove-instance", daemon=True
        )
        try:
            removal.start()
        except RuntimeError:  # the machine has no more threads
            self._finish_removal(instance, thread)
            return None
        self._removals.add(removal)
        return None if is_busy else removal

    def _finish_removal(self, instance: LoadedInstance, thread: InstanceThread | None) -> None:
        """Waits for the instance's thread and requests, then finalises it."""
        if thread is not None:
            thread.join()
        self._live.wait_until_gone(self._live.with_instance(instance))
        instance.finalize()
        log.info("removed instance '%s' of model '%s'", instance.name, self._model)
        self._rate_limiter.unregister(instance)
