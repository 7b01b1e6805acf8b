"""The resources of the rate limiter: who needs what, how much there is, and what is in use.

For: RateLimiter, whose lock guards it. Does not know: threads, batches, priorities. Invariants: nobody is registered
who needs more than there is, so everyone's turn can come; what is in use never exceeds what there is, except while the
limit of a resource sinks because its largest user was unregistered.
Source: ResourceManager in Triton's rate_limiter.cc, with its texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tritonclient.grpc.model_config_pb2 import ModelRateLimiter

from llmbackend.core.errors import invalid_argument

RateLimitMode = Literal["off", "execution_count"]
GLOBAL = -2
EVERY_DEVICE = -1
"""As the device of a resource: one count for the whole host; the same count on each device (`--rate-limit-resource`
without a device)."""

Need = Mapping[tuple[int, str], int]
"""(device, name) → count."""


@dataclass(frozen=True, slots=True)
class RateLimitResource:
    """One `--rate-limit-resource=name:count[:device]`."""

    name: str
    count: int
    device: int = EVERY_DEVICE


def need_of(config: ModelRateLimiter, device: int) -> Need:
    """What one execution of an instance on that device needs."""
    need = {}
    for resource in config.resources:
        is_global = getattr(resource, "global")  # a keyword of Python's
        need[(GLOBAL if is_global else device, resource.name)] = resource.count
    return need


class Resources:
    """`given` is what the command line grants: where it grants anything, what it does not name is not there. Where it
    grants nothing, there is as much of each resource as its largest user needs."""

    def __init__(self, given: Iterable[RateLimitResource]) -> None:
        self._given: dict[tuple[int, str], int] = {}
        for resource in given:
            key = (resource.device, resource.name)
            self._given[key] = max(resource.count, self._given.get(key, 0))
        self._needs: dict[Hashable, Need] = {}
        self._limits: dict[tuple[int, str], int] = {}
        self._used: Counter[tuple[int, str]] = Counter()

    def register(self, user: Hashable, need: Need) -> None:
        """Raises TritonError INVALID_ARG, and does not register, when that is more than there is."""
        self._needs[user] = need
        try:
            self._update_limits()
        except BaseException:
            self.unregister(user)
            raise

    def unregister(self, user: Hashable) -> None:
        """What the user has in use stays so until it is given back."""
        self._needs.pop(user, None)
        self._update_limits()

    def fits(self, need: Need) -> bool:
        return all(self._used[key] + count <= self._limits.get(key, 0) for key, count in need.items())

    def take(self, need: Need) -> None:
        self._used.update(need)

    def give_back(self, need: Need) -> None:
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
        """How much there is of a resource whose largest user needs `largest`."""
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
