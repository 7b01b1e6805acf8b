"""The dynamic batcher: several queued requests that fit together go to one Execute.

For: models with `dynamic_batching`, and sequences of the oldest strategy. Does not know: how tensors are joined
(Execute gets separate requests). Invariants: a batch is a prefix of the queue; no request waits longer than
max_queue_delay for others.
Source: GetDynamicBatch in Triton's dynamic_batch_scheduler.cc, RequiredEqualInputs; golden transcript 59.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.metrics.statistics import Statistics
from llmbackend.core.requests.queued_request import QueuedRequest
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import MAX_SLEEP_S, Timer

from .batch_strategy import BatchStrategy, FormingBatch
from .request_queue import RequestQueue

BatchKey = tuple[tuple[str, tuple[int, ...] | None], ...]


class EqualInputs:
    """What requests of one model must have in common to share a batch: the shapes of inputs that are variable and not
    `allow_ragged_batch`, and, if inputs are optional, which ones are there. Equal keys mean that requests can be joined
    along the batch dimension; a model whose inputs cannot differ has one key, so that nothing is compared."""

    def __init__(self, config: ModelConfig) -> None:
        self._of_equal_shape = frozenset(
            tensor.name for tensor in config.input if -1 in tensor.dims and not tensor.allow_ragged_batch
        )
        self._has_optional = any(tensor.optional for tensor in config.input)

    def key(self, request: QueuedRequest) -> BatchKey:
        """Equal for requests that may share a batch."""
        if not self._of_equal_shape and not self._has_optional:
            return ()
        return tuple(
            (name, tensor.shape[1:] if name in self._of_equal_shape else None)
            for name, tensor in request.inputs.items()  # sorted by name by the request validator
            if name in self._of_equal_shape or self._has_optional
        )


@dataclass(slots=True)
class _Prefix:
    """The requests at the front of the queue that fit one batch."""

    count: int = 0
    """Requests."""
    rows: int = 0
    preferred_count: int = 0
    """How many of the requests make up the best preferred size; 0 = none."""
    is_full: bool = False
    """Whether the batch cannot grow."""
    oldest_ns: int = 0
    """When its oldest request was queued (monotonic)."""

    def add(self, request: QueuedRequest, rows: int) -> None:
        self.rows += rows
        self.count += 1
        # With priorities the first is not always the oldest.
        self.oldest_ns = min(self.oldest_ns or request.batcher_start_ns, request.batcher_start_ns)


class DynamicBatcher(RequestQueue):
    """The queue of a model with dynamic batching.

    A batch has at most max_batch_size rows unless a single request has more. It exceeds the largest preferred size
    only when its oldest request has waited max_queue_delay. An instance forms its batch on its own thread, when it is
    free, so that a batch grows until then; `optimization.eager_batching` therefore has no effect.

    strategy: may end a batch earlier
    """

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

    def enqueue(self, request: QueuedRequest) -> None:
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
        return 0, min((self._max_delay_ns - waited_ns) / 1e9, MAX_SLEEP_S)

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
                    prefix.preferred_count = prefix.count  # as close to a preferred size as possible
                if prefix.rows + rows > self._most_rows or request.batch_key != first.batch_key:
                    prefix.is_full = True
                    break
            # A request that the strategy refuses even as the first goes alone, or it would block the queue.
            if batch is not None and not batch.includes(request) and prefix.count:
                prefix.is_full = True
                break
            prefix.add(request, rows)
            if prefix.rows in self._preferred:
                prefix.preferred_count = prefix.count
        prefix.is_full |= prefix.rows >= self._largest_preferred
        return prefix
