"""The rate limiter: an instance executes only when it has its resources, and in the order of priorities, across models.

For: `--rate-limit=execution_count`. Does not know: what a batch holds, how resources are counted (Resources).
Invariants: of the instances that are ready to execute, the one with the lowest (executions so far x priority) is first,
and nobody passes it, so that large needs are met, too; an instance that waits forms no batch, so its requests can still
be cancelled, time out and gain company; a lease is given back when the execution ended, however it ended.
Source: Triton's rate_limiter.cc. Off, it costs nothing: instance threads then ask the scheduler directly.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tritonclient.grpc.model_config_pb2 import ModelRateLimiter

from llmbackend.core.requests.infer_request import InferRequest

from .rate_limit_resources import Need, RateLimitMode, RateLimitResource, Resources, need_of
from .scheduler import Batches, BatchSource


class LimitedInstance(Protocol):
    """An instance as the limiter sees it."""

    @property
    def device_id(self) -> int: ...
    @property
    def rate_limiter(self) -> ModelRateLimiter: ...


@dataclass(eq=False, slots=True)
class Lane:
    """One registered instance. `rank` is its place among those that wait: the lower, the earlier."""

    need: Need
    priority: int
    executions: int
    is_open: bool = True
    rank: tuple[int, int] = (0, 0)


class RateLimiter:
    """Any thread. One lock for all: the limiter is for hosts where executions are few and large."""

    def __init__(self, mode: RateLimitMode = "off", given: Iterable[RateLimitResource] = ()) -> None:
        self._is_on = mode == "execution_count"
        self._changed = threading.Condition(threading.Lock())
        self._resources = Resources(given)
        self._lanes: dict[LimitedInstance, Lane] = {}
        self._waiting: set[Lane] = set()
        self._turns = itertools.count()

    def register(self, instance: LimitedInstance) -> None:
        """Raises TritonError INVALID_ARG with Triton's text when the instance needs more than there is."""
        if not self._is_on:
            return
        config = instance.rate_limiter
        priority = max(config.priority, 1)
        with self._changed:
            # By design unlike Triton's 0: who comes later does not go before all others until it has caught up.
            least = min((lane.executions * lane.priority for lane in self._lanes.values()), default=0)
            lane = Lane(need_of(config, instance.device_id), priority, executions=least // priority)
            self._resources.register(lane, lane.need)
            self._lanes[instance] = lane

    def unregister(self, instance: LimitedInstance) -> None:
        """The instance gets no further lease; one that waits for it goes without. Idempotent."""
        with self._changed:
            lane = self._lanes.pop(instance, None)
            if lane is not None:
                lane.is_open = False
                self._resources.unregister(lane)
                self._changed.notify_all()

    def source(self, instances: Sequence[LimitedInstance], source: BatchSource) -> Batches:
        """Where the thread of `instances`, which executes them in turn, gets its batches."""
        if not self._is_on:
            return source
        return _LimitedSource(self, instances, source)

    def acquire(self, instance: LimitedInstance) -> Lane | None:
        """Blocks until it is the instance's turn and its resources are there, and takes them. None when it was
        unregistered."""
        with self._changed:
            lane = self._lanes.get(instance)
            if lane is None:
                return None
            lane.rank = (lane.executions * lane.priority, next(self._turns))
            self._waiting.add(lane)
            while lane.is_open and not (self._is_first(lane) and self._resources.fits(lane.need)):
                self._changed.wait()
            self._waiting.discard(lane)
            if lane.is_open:
                self._resources.take(lane.need)
            self._changed.notify_all()  # there is another first one now
            return lane if lane.is_open else None

    def release(self, lane: Lane, has_executed: bool) -> None:
        with self._changed:
            lane.executions += has_executed
            self._resources.give_back(lane.need)
            self._changed.notify_all()

    def left_behind(self) -> dict[str, int]:
        """Counts that are 0 while nothing is executed."""
        with self._changed:
            return {"rate limiter resources in use": self._resources.used_count}

    def _is_first(self, lane: Lane) -> bool:
        return min(self._waiting, key=lambda waiting: waiting.rank) is lane


class _LimitedSource:
    """The batches of one instance thread, each with a lease that ends when the thread comes back for the next."""

    def __init__(self, limiter: RateLimiter, instances: Sequence[LimitedInstance], source: BatchSource) -> None:
        self._limiter = limiter
        self._instances = itertools.cycle(instances)  # the thread executes the batches on them in this order
        self._source = source
        self._lease: Lane | None = None

    def next_batch(self) -> list[InferRequest] | None:
        self._end_lease()
        instance = next(self._instances)
        while self._source.wait_for_batch():
            lease = self._limiter.acquire(instance)
            if lease is None:
                return None
            if batch := self._source.take_batch():
                self._lease = lease
                return batch
            self._limiter.release(lease, has_executed=False)  # another instance was faster, or the client gave up
        return None

    def _end_lease(self) -> None:
        if self._lease is not None:
            self._limiter.release(self._lease, has_executed=True)
            self._lease = None
