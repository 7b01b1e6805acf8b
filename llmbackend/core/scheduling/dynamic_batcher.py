"""The dynamic batcher: several queued requests of equal shapes go to one Execute.

For: models with `dynamic_batching`. Does not know: how tensors are joined (Execute still gets separate requests).
Invariants: a batch is a prefix of the queue, so order is kept; its size is at most the largest preferred size unless
one request alone is larger; no request waits for company longer than max_queue_delay. An instance forms its batch on
its own thread: there is no batcher thread, and a batch is formed only when an instance is free.
Source: Triton's dynamic batcher; golden transcript 59.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.infer_request import InferRequest
from llmbackend.core.statistics import Statistics
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import LONGEST_SLEEP_S, Timer

from .request_queue import RequestQueue


@dataclass(slots=True)
class _Prefix:
    """How many requests fit one batch, how many make the largest preferred one (0 = none), whether no more fit, and
    when the oldest of them was queued."""

    count: int = 0
    preferred_count: int = 0
    is_full: bool = False
    oldest_ns: int = 0


class DynamicBatcher(RequestQueue):
    def __init__(self, config: ModelConfig, statistics: Statistics, timer: Timer) -> None:
        batching = config.dynamic_batching
        super().__init__(QueuePolicies.of(batching), statistics, timer)
        self._preferred = frozenset(batching.preferred_batch_size)
        self._limit = max(self._preferred, default=max(config.max_batch_size, 1))
        self._max_delay_ns = batching.max_queue_delay_microseconds * 1000

    def _form_batch(self) -> tuple[list[InferRequest], float | None]:
        prefix = self._longest_prefix()
        count = prefix.count
        delay_ns = self._max_delay_ns - (time.monotonic_ns() - prefix.oldest_ns)
        if prefix.preferred_count and delay_ns > 0:
            count = prefix.preferred_count
        elif not prefix.is_full and delay_ns > 0 and not self._stopped:
            return [], min(delay_ns / 1e9, LONGEST_SLEEP_S)
        return [self._queue.pop_first() for _ in range(count)], None

    def _longest_prefix(self) -> _Prefix:
        prefix, total, shapes = _Prefix(), 0, None
        for request in self._queue:
            size = max(request.batch_size, 1)
            if prefix.count and (total + size > self._limit or request.batch_key != shapes):
                prefix.is_full = True
                return prefix
            shapes = shapes if prefix.count else request.batch_key
            total += size
            prefix.count += 1
            # By priority the first is not always the oldest.
            prefix.oldest_ns = min(prefix.oldest_ns or request.batcher_start_ns, request.batcher_start_ns)
            if total in self._preferred:
                prefix.preferred_count = prefix.count
        prefix.is_full = total >= self._limit
        return prefix
