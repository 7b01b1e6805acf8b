"""The rate limiter (`--rate-limit=execution_count`): an instance executes only when it has its resources, in priority
order across all models.

Invariants: no instance is registered that needs more resources than exist; a lease ends with its execution. When off it
costs nothing: threads call the scheduler directly. Source: Triton's rate_limiter.cc, including its texts.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tritonclient.grpc.model_config_pb2 import ModelRateLimiter

from ..errors import invalid_argument
from ..requests.queued_request import QueuedRequest
from .scheduler import Batches, BatchSource

RateLimitMode = Literal["off", "execution_count"]
GLOBAL = -2
EVERY_DEVICE = -1
"""`device` of a resource. GLOBAL: one count for the whole host; EVERY_DEVICE: the same count on each device
(`--rate-limit-resource` without a device)."""

Need = Mapping[tuple[int, str], int]
"""(device, name) → count."""


@dataclass(frozen=True, slots=True)
class RateLimitResource:
    """One `--rate-limit-resource=name:count[:device]`."""

    name: str
    count: int
    device: int = EVERY_DEVICE


def need_of(config: ModelRateLimiter, device: int) -> Need:
    """The resources that an execution of an instance on that device needs."""
    need = {}
    for resource in config.resources:
        is_global = getattr(resource, "global")  # a keyword in Python
        need[(GLOBAL if is_global else device, resource.name)] = resource.count
    return need


class ResourceManager:
    """Resource limits and current use. Guarded by RateLimiter's lock.

    given: from the command line. If any are given, no others exist; otherwise the limit of a resource is the need of
        its largest user. Use may temporarily exceed the limit after the largest user is unregistered.
    """

    def __init__(self, given: Iterable[RateLimitResource]) -> None:
        self._given: dict[tuple[int, str], int] = {}
        for resource in given:
            key = (resource.device, resource.name)
            self._given[key] = max(resource.count, self._given.get(key, 0))
        self._needs: dict[Hashable, Need] = {}
        self._limits: dict[tuple[int, str], int] = {}
        self._used: Counter[tuple[int, str]] = Counter()

    def register(self, user: Hashable, need: Need) -> None:
        """Raises TritonError INVALID_ARG, without registering, if the need exceeds a limit."""
        self._needs[user] = need
        try:
            self._update_limits()
        except BaseException:
            self.unregister(user)
            raise

    def unregister(self, user: Hashable) -> None:
        """Resources in use are released separately."""
        self._needs.pop(user, None)
        self._update_limits()

    def fits(self, need: Need) -> bool:
        return all(self._used[key] + count <= self._limits.get(key, 0) for key, count in need.items())

    def take(self, need: Need) -> None:
        self._used.update(need)

    def release(self, need: Need) -> None:
        self._used.subtract(need)

    @property
    def used_count(self) -> int:
        return sum(self._used.values())

    def _update_limits(self) -> None:
        largest: dict[tuple[int, str], int] = {}
        for need in self._needs.values():
            for key, count in need.items():
                largest[key] = max(count, largest.get(key, 0))
        limits = {key: self._limit(key, count) for key, count in largest.items()}
        global_names = {name for device, name in limits if device == GLOBAL}
        for device, name in limits:
            if device != GLOBAL and name in global_names:
                raise invalid_argument(
                    f'Resource "{name}" is present as both global and device-specific resource in the model '
                    f"configuration."
                )
        self._limits = limits

    def _limit(self, key: tuple[int, str], largest: int) -> int:
        """The limit of a resource whose largest user needs `largest`."""
        if not self._given:
            return largest
        device, name = key
        if device == GLOBAL:
            counts = [count for (_, given_name), count in self._given.items() if given_name == name]
        else:
            counts = [self._given.get((device, name), 0), self._given.get((EVERY_DEVICE, name), 0)]
        limit = max(counts, default=0)
        if limit < largest:
            raise invalid_argument(
                f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of one or more model '
                f"instances, the minimum required count is {largest}"
            )
        return limit


class LimitedInstance(Protocol):
    @property
    def device_id(self) -> int: ...
    @property
    def rate_limiter(self) -> ModelRateLimiter: ...


@dataclass(eq=False, slots=True)
class Registration:
    """One registered instance.

    priority: 1 is the highest
    is_open: whether it is still registered
    rank: the lowest among waiting instances is next
    """

    need: Need
    priority: int
    executions: int
    is_open: bool = True
    rank: tuple[int, int] = (0, 0)


class RateLimiter:
    """Thread-safe. Has a single lock, because the limiter is meant for hosts with few, large executions.

    Of the instances ready to execute, the one with the lowest (executions x priority) is next and is not overtaken, so
    that large needs are met too. An instance forms no batch while it waits, so that its requests can still be
    cancelled, time out and be joined by others.
    """

    def __init__(self, mode: RateLimitMode = "off", given: Iterable[RateLimitResource] = ()) -> None:
        self._is_on = mode == "execution_count"
        self._changed = threading.Condition(threading.Lock())
        self._resources = ResourceManager(given)
        self._registrations: dict[LimitedInstance, Registration] = {}
        self._waiting: set[Registration] = set()
        self._turns = itertools.count()

    def register(self, instance: LimitedInstance) -> None:
        """Raises TritonError INVALID_ARG with Triton's text if the instance needs more than a limit."""
        if not self._is_on:
            return
        config = instance.rate_limiter
        priority = max(config.priority, 1)
        with self._changed:
            # Deliberate difference: Triton starts at 0, which gives a new instance precedence until it has caught up
            # with the others.
            used = (each.executions * each.priority for each in self._registrations.values())
            executions = min(used, default=0) // priority
            registration = Registration(need_of(config, instance.device_id), priority, executions)
            self._resources.register(registration, registration.need)
            self._registrations[instance] = registration

    def unregister(self, instance: LimitedInstance) -> None:
        """The instance gets no further leases; a waiting `acquire` returns None. Idempotent."""
        with self._changed:
            registration = self._registrations.pop(instance, None)
            if registration is not None:
                registration.is_open = False
                self._resources.unregister(registration)
                self._changed.notify_all()

    def limit(self, instances: Sequence[LimitedInstance], source: BatchSource) -> Batches:
        """Limits the batches of `source` for a thread that executes on `instances` in turn."""
        if not self._is_on:
            return source
        return _LimitedSource(self, instances, source)

    def acquire(self, instance: LimitedInstance) -> Registration | None:
        """Blocks until it is the instance's turn, and takes its resources. Returns None if it was unregistered."""
        with self._changed:
            registration = self._registrations.get(instance)
            if registration is None:
                return None
            registration.rank = (registration.executions * registration.priority, next(self._turns))
            self._waiting.add(registration)
            while registration.is_open and not (
                self._is_first(registration) and self._resources.fits(registration.need)
            ):
                self._changed.wait()
            self._waiting.discard(registration)
            if registration.is_open:
                self._resources.take(registration.need)
            self._changed.notify_all()  # another instance may now be next
            return registration if registration.is_open else None

    def release(self, registration: Registration, has_executed: bool) -> None:
        with self._changed:
            registration.executions += has_executed
            self._resources.release(registration.need)
            self._changed.notify_all()

    def leaked_resources(self) -> dict[str, int]:
        """Counts that are 0 while nothing is executed."""
        with self._changed:
            return {"rate limiter resources in use": self._resources.used_count}

    def _is_first(self, registration: Registration) -> bool:
        return min(self._waiting, key=lambda waiting: waiting.rank) is registration


class _LimitedSource:
    """The batches of one instance thread, each with a lease until the thread asks for the next batch."""

    def __init__(self, limiter: RateLimiter, instances: Sequence[LimitedInstance], source: BatchSource) -> None:
        self._limiter = limiter
        self._instances = itertools.cycle(instances)  # in the thread's order
        self._source = source
        self._lease: Registration | None = None

    def next_batch(self) -> list[QueuedRequest] | None:
        if self._lease is not None:
            self._limiter.release(self._lease, has_executed=True)
            self._lease = None
        instance = next(self._instances)
        while self._source.wait_for_batch():
            lease = self._limiter.acquire(instance)
            if lease is None:
                return None
            if batch := self._source.take_batch():
                self._lease = lease
                return batch
            self._limiter.release(lease, has_executed=False)  # its batch was taken by another instance, or cancelled
        return None
