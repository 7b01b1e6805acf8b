"""The dynamic batcher: several queued requests that fit together go to one Execute.

For: models with `dynamic_batching`. Does not know: how tensors are joined (Execute still gets separate requests).
Invariants: a batch is a prefix of the queue, so order is kept; it has at most max_batch_size rows unless one request
alone has more, and more than the largest preferred size only once its oldest request has waited max_queue_delay; no
request waits for company longer than that. An instance forms its batch on its own thread: there is no batcher thread,
and a batch is formed only when an instance is free, so that it can grow until then. `optimization.eager_batching`
therefore has nothing to prepare ahead.
Source: GetDynamicBatch in Triton's dynamic_batch_scheduler.cc; golden transcript 59.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.statistics import Statistics
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import LONGEST_SLEEP_S, Timer

from .batch_strategy import BatchStrategy, FormingBatch
from .equal_inputs import EqualInputs
from .request_queue import RequestQueue


@dataclass(slots=True)
class _Prefix:
    """The requests at the front that fit one batch: how many, how many rows, how many of them make the best preferred
    size (0 = none), whether the batch can not grow, and when the oldest of them was queued."""

    count: int = 0
    rows: int = 0
    preferred_count: int = 0
    is_full: bool = False
    oldest_ns: int = 0

    def add(self, request: InferRequest, rows: int) -> None:
        self.rows += rows
        self.count += 1
        # By priority the first is not always the oldest.
        self.oldest_ns = min(self.oldest_ns or request.batcher_start_ns, request.batcher_start_ns)


class DynamicBatcher(RequestQueue):
    """`strategy` may end a batch earlier than this batcher would."""

    def __init__(
        self, config: ModelConfig, statistics: Statistics, timer: Timer, strategy: BatchStrategy | None = None
    ) -> None:
        batching = config.dynamic_batching
        super().__init__(QueuePolicies.of(batching), statistics, timer)
        self._equal_inputs = EqualInputs(config)
        self._strategy = strategy
        self._preferred = frozenset(batching.preferred_batch_size)
        self._most_rows = max(config.max_batch_size, 1)
        self._largest_preferred = max(self._preferred, default=self._most_rows)
        self._max_delay_ns = batching.max_queue_delay_microseconds * 1000

    def enqueue(self, request: InferRequest) -> None:
        request.batch_key = self._equal_inputs.key(request)
        super().enqueue(request)

    def _ready_count(self) -> tuple[int, float | None]:
        prefix = self._prefix()
        waited_ns = time.monotonic_ns() - prefix.oldest_ns
        is_late = 0 < self._max_delay_ns <= waited_ns
        if prefix.preferred_count and not is_late:
            return prefix.preferred_count, None
        if prefix.is_full or is_late or not self._max_delay_ns or self._stopped:
            return prefix.count, None
        return 0, min((self._max_delay_ns - waited_ns) / 1e9, LONGEST_SLEEP_S)

    def _prefix(self) -> _Prefix:
        if self._strategy is None:
            return self._longest_prefix(None)
        with self._strategy.new_batch() as batch:
            return self._longest_prefix(batch)

    def _longest_prefix(self, batch: FormingBatch | None) -> _Prefix:
        prefix, first = _Prefix(), None
        for request in self._queue:
            rows = max(request.batch_size, 1)
            first = first or request
            if prefix.count:
                if prefix.rows + rows > self._largest_preferred and not prefix.preferred_count:
                    prefix.preferred_count = prefix.count  # as near to a preferred size as it gets
                if prefix.rows + rows > self._most_rows or request.batch_key != first.batch_key:
                    prefix.is_full = True
                    break
            # What the strategy does not want even as the first goes alone: it must not block those behind it.
            if batch is not None and not batch.includes(request) and prefix.count:
                prefix.is_full = True
                break
            prefix.add(request, rows)
            if prefix.rows in self._preferred:
                prefix.preferred_count = prefix.count
        prefix.is_full |= prefix.rows >= self._largest_preferred
        return prefix
