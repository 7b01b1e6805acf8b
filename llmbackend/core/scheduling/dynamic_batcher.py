"""The dynamic batcher: several queued requests of equal shapes go to one Execute.

For: models with `dynamic_batching`. Does not know: how tensors are joined (Execute still gets separate requests).
Invariants: a batch is a prefix of the queue, so order is kept; its size is at most the largest preferred size unless
one request alone is larger; no request waits for company longer than max_queue_delay. An instance forms its batch on
its own thread: there is no batcher thread, and a batch is formed only when an instance is free.
Source: Triton's dynamic batcher; golden transcript 59.
"""

from __future__ import annotations

import time

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.infer_request import InferRequest
from llmbackend.core.statistics import Statistics

from .request_queue import QueuePolicy, RequestQueue


class DynamicBatcher(RequestQueue):
    def __init__(self, config: ModelConfig, statistics: Statistics) -> None:
        batching = config.dynamic_batching
        super().__init__(QueuePolicy.of(batching.default_queue_policy), statistics)
        self._preferred = frozenset(batching.preferred_batch_size)
        self._limit = max(self._preferred, default=max(config.max_batch_size, 1))
        self._max_delay_ns = batching.max_queue_delay_microseconds * 1000

    def _form_batch(self) -> tuple[list[InferRequest], float | None]:
        count, preferred_count, is_full = self._longest_prefix()
        delay_ns = self._max_delay_ns - (time.monotonic_ns() - self._queue[0].queue_start_ns)
        if preferred_count and delay_ns > 0:
            count = preferred_count
        elif not is_full and delay_ns > 0 and not self._stopped:
            return [], delay_ns / 1e9
        return [self._queue.popleft() for _ in range(count)], None

    def _longest_prefix(self) -> tuple[int, int, bool]:
        """How many requests fit one batch, how many make the largest preferred one (0 = none), and whether no more
        fit.
        """
        total = count = preferred_count = 0
        shapes = self._queue[0].batch_key
        for request in self._queue:
            size = max(request.batch_size, 1)
            if count and (total + size > self._limit or request.batch_key != shapes):
                return count, preferred_count, True
            total += size
            count += 1
            if total in self._preferred:
                preferred_count = count
        return count, preferred_count, total >= self._limit
