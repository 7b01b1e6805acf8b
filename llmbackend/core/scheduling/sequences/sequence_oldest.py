"""The oldest strategy: a dynamic batcher over the first requests of the sequences that have a slot.

For: the sequence batcher, for models that tell sequences apart by their correlation ids. Does not know: correlation
ids, clients, how a batch is chosen (DynamicBatcher: preferred sizes, delay, order of responses, equal shapes).
Invariant: a sequence has at most one request in the dynamic batcher or with the instance; the next one follows when it
is released. Source: OldestSequenceBatch of Triton's sequence batcher.
"""

from __future__ import annotations

from functools import partial

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.errors import TritonError
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.scheduling.dynamic_batcher import DynamicBatcher
from llmbackend.core.scheduling.response_order import ResponseOrder
from llmbackend.core.scheduling.scheduler import Scheduler
from llmbackend.core.statistics import FailureReason, Statistics
from llmbackend.waiting.timer import Timer

from .sequence import Sequence
from .sequence_lane import LaneOwner, SequenceLane
from .sequence_step import step_of


class SequenceOldest(SequenceLane):
    def __init__(self, config: ModelConfig, owner: LaneOwner, statistics: Statistics, timer: Timer) -> None:
        candidates = config.sequence_batching.oldest.max_candidate_sequences
        super().__init__(candidates or max(config.max_batch_size, 1), owner)
        batcher = DynamicBatcher(_as_dynamic_batching(config), statistics, timer)
        is_ordered = config.sequence_batching.oldest.preserve_ordering
        self._batcher: Scheduler = ResponseOrder(batcher) if is_ordered else batcher
        self._batches = self._batcher.source("")

    def feed(self, sequence: Sequence) -> None:
        if sequence.waiting and not sequence.running:
            request = self._owner.take(sequence, is_tracked=True)
            self._owner.later(partial(self._enqueue, request))

    def stop(self) -> None:
        self._batcher.stop()

    def next_batch(self) -> list[InferRequest] | None:
        batch = self._batches.next_batch()
        return None if batch is None else self._handed_out(batch)

    def wait_for_batch(self) -> bool:
        return self._batches.wait_for_batch()

    def take_batch(self) -> list[InferRequest]:
        return self._handed_out(self._batches.take_batch())

    def _handed_out(self, batch: list[InferRequest]) -> list[InferRequest]:
        for request in batch:
            self._owner.hand_out(step_of(request).sequence, request)
        return batch

    def _enqueue(self, request: InferRequest) -> None:
        try:
            self._batcher.enqueue(request)
        except TritonError as error:  # stopped meanwhile
            request.fail(error, FailureReason.REJECTED)


def _as_dynamic_batching(config: ModelConfig) -> ModelConfig:
    """The same model with a dynamic batcher as `oldest` describes it."""
    oldest = config.sequence_batching.oldest
    batching = ModelConfig()
    batching.CopyFrom(config)
    batching.dynamic_batching.preferred_batch_size.extend(oldest.preferred_batch_size)
    batching.dynamic_batching.max_queue_delay_microseconds = oldest.max_queue_delay_microseconds
    return batching
