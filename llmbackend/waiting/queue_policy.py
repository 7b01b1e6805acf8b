"""Triton's queue policies: how many requests may wait at a priority level, how long, and what happens afterwards.

Source: PolicyQueue and PriorityQueue in Triton's scheduler_utils.cc, InferenceRequest::SetPriority. Deliberate
difference: if the default timeout is 0 (none), a request's own timeout still applies if overriding is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import ModelDynamicBatching, ModelQueuePolicy

ONLY_LEVEL = 0
"""The level of all requests of a model without priority levels."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The policy of one priority level.

    max_queue_size: requests; 0 = no limit
    timeout_us: longest time in the queue; 0 = no limit
    reject: whether a request fails after the timeout; False = it is served after the others of its level
    allow_timeout_override: whether a request may shorten the timeout
    """

    max_queue_size: int = 0
    timeout_us: int = 0
    reject: bool = True
    allow_timeout_override: bool = False

    @classmethod
    def of(cls, message: ModelQueuePolicy) -> QueuePolicy:
        return cls(
            message.max_queue_size,
            message.default_timeout_microseconds,
            message.timeout_action == ModelQueuePolicy.REJECT,
            message.allow_timeout_override,
        )

    def deadline_ns(self, queue_start_ns: int, request_timeout_us: int) -> int:
        """When a request's time in the queue ends (monotonic ns); 0 = never."""
        timeout_us = self.timeout_us
        if self.allow_timeout_override and request_timeout_us > 0:
            timeout_us = min(request_timeout_us, timeout_us or request_timeout_us)
        return queue_start_ns + timeout_us * 1000 if timeout_us else 0


@dataclass(frozen=True, slots=True)
class QueuePolicies:
    """The policies of one model.

    levels: 0 = no priorities; else 1 is the highest level and `levels` the lowest
    by_level: policies of the levels that do not have the `default`
    """

    default: QueuePolicy = field(default_factory=QueuePolicy)
    levels: int = 0
    default_level: int = ONLY_LEVEL
    by_level: Mapping[int, QueuePolicy] = field(default_factory=dict)

    @classmethod
    def of(cls, batching: ModelDynamicBatching) -> QueuePolicies:
        return cls(
            QueuePolicy.of(batching.default_queue_policy),
            batching.priority_levels,
            batching.default_priority_level if batching.priority_levels else ONLY_LEVEL,
            {level: QueuePolicy.of(policy) for level, policy in batching.priority_queue_policy.items()},
        )

    def priority(self, requested: int) -> int:
        """The priority of a request. With levels, 0 and values above `levels` become the default level; without, it is
        the requested one, for the backend to interpret."""
        if not self.levels:
            return requested
        return requested if 0 < requested <= self.levels else self.default_level

    def level(self, priority: int) -> int:
        return priority if self.levels else ONLY_LEVEL

    def policy(self, level: int) -> QueuePolicy:
        return self.by_level.get(level, self.default)
