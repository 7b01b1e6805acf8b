"""The two strategies of the sequence batcher, which form batches from the slots of an instance.

Source: DirectSequenceBatch and OldestSequenceBatch of Triton's sequence batcher, InferenceRequest::CopyAsNull.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from functools import partial

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.waiting.timer import MAX_SLEEP_S, Timer

from ...backend_api import ResponseFlag
from ...errors import TritonError
from ...messages import InferenceRequest, InferenceResponse
from ...metrics.model_metrics import FailureReason, Statistics
from ...requests.queued_request import QueuedRequest
from ...requests.request_validation import ValidRequest
from ...requests.response_channel import ChannelOwner, ResponseChannel
from ...tensors import Tensor
from ..dynamic_batcher import DynamicBatcher, EqualInputs
from ..scheduler import ResponseOrder, Scheduler
from .inputs import SequenceControls, StateRules
from .sequence import Sequence, SequenceBatch, SequenceBatchOwner, turn_of

Ready = dict[int, Sequence]
"""Sequences with a waiting request by slot number, in ascending order."""


class NullOwner:
    """Owner of null requests in place of the model, which must not count them."""

    def __init__(self, model: ChannelOwner) -> None:
        self.name = model.name
        self.version = model.version
        self.statistics = Statistics()
        self.reaper = model.reaper
        self.may_block_in_send = False  # nothing observes its responses

    def request_done(self, channel: ResponseChannel) -> None:
        pass


class NullRequest(QueuedRequest):
    collects_statistics = False


def null_request(owner: NullOwner, pattern: QueuedRequest, controls: Mapping[str, Tensor]) -> NullRequest:
    """A request without outputs whose inputs are `controls` and zeros in the shapes of `pattern`."""
    message = InferenceRequest(owner.name)
    inputs = {**{name: _zeros_like(tensor) for name, tensor in pattern.inputs.items()}, **controls}
    valid = ValidRequest(inputs, (), pattern.batch_size)
    request = NullRequest(message, valid, ResponseChannel(message, _ignore, owner))
    request.queue_start_ns = time.monotonic_ns()
    return request


def _zeros_like(tensor: Tensor) -> Tensor:
    data = np.full_like(tensor.data, b"") if tensor.datatype == "BYTES" else np.zeros_like(tensor.data)
    return Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def _ignore(response: InferenceResponse | None, flags: ResponseFlag) -> None:
    pass


class DirectSequenceBatch(SequenceBatch):
    """The direct strategy: a sequence's slot is its row in every batch.

    All requests in a batch have equal shapes. A slot whose sequence has no request, or one with a different shape, gets
    a null request with READY false, up to the last slot that has a request.
    """

    def __init__(
        self,
        config: ModelConfig,
        owner: SequenceBatchOwner,
        lock: threading.Lock,
        controls: SequenceControls,
        states: StateRules,
        null_owner: NullOwner,
    ) -> None:
        super().__init__(max(config.max_batch_size, 1), owner)
        direct = config.sequence_batching.direct
        self._max_delay_ns: int = direct.max_queue_delay_microseconds * 1000
        # The field is float32: a tenth of ten slots is one, not slightly more.
        self._enough = math.ceil(direct.minimum_slot_utilization * max(config.max_batch_size, 1) - 1e-6)
        self._equal_inputs = EqualInputs(config)
        self._controls = controls
        self._states = states
        self._null_owner = null_owner
        self._changed = threading.Condition(lock)
        self._is_stopped = False

    def feed(self, sequence: Sequence) -> None:
        self._changed.notify()

    def stop(self) -> None:
        self._is_stopped = True
        self._changed.notify()

    def next_batch(self) -> list[QueuedRequest] | None:
        with self._owner.locked():
            ready = self._await_ready()
            return self._batch(ready) if ready else None

    def wait_for_batch(self) -> bool:
        with self._owner.locked():
            return bool(self._await_ready())

    def take_batch(self) -> list[QueuedRequest]:
        with self._owner.locked():
            ready = self._ready()
            return self._batch(ready) if ready and not self._delay_left_s(ready) else []

    def _ready(self) -> Ready:
        return {slot: sequence for slot, sequence in self.slots.in_order() if sequence.waiting}

    def _await_ready(self) -> Ready:
        """Waits until a batch is due; {} = stopped."""
        while True:
            ready = self._ready()
            wait_s = self._delay_left_s(ready) if ready else None
            if (ready and not wait_s) or (not ready and self._is_stopped):
                return ready
            self._changed.wait(wait_s)

    def _delay_left_s(self, ready: Ready) -> float:
        """How many seconds to wait for more sequences; 0 = not at all."""
        if not self._max_delay_ns or len(ready) >= self._enough or self._is_stopped:
            return 0.0
        oldest_ns = min(sequence.waiting[0].queue_start_ns for sequence in ready.values())
        left_ns = oldest_ns + self._max_delay_ns - time.monotonic_ns()
        return min(max(left_ns, 0) / 1e9, MAX_SLEEP_S)

    def _batch(self, ready: Ready) -> list[QueuedRequest]:
        """The first ready sequence determines the shapes. Slots are freed after the whole batch has been taken, so that
        their next sequences do not join it."""
        shapes = self._equal_inputs.key(next(iter(ready.values())).waiting[0])
        taken: dict[int, QueuedRequest] = {}
        for slot, sequence in ready.items():
            if self._equal_inputs.key(sequence.waiting[0]) == shapes:
                taken[slot] = self._owner.take(sequence, is_tracked=False)
                self._owner.hand_out(sequence, taken[slot])
        for slot in taken:
            self._owner.free_if_over(ready[slot])
        pattern = next(iter(taken.values()))
        return [taken.get(slot) or self._null(pattern) for slot in range(max(ready) + 1)]

    def _null(self, pattern: QueuedRequest) -> QueuedRequest:
        request = null_request(self._null_owner, pattern, self._controls.not_ready())
        request.states = self._states.new_states()
        return request


class OldestSequenceBatch(SequenceBatch):
    """The oldest strategy: a dynamic batcher for the first request of each sequence that has a slot. A sequence has at
    most one request in the batcher or at the instance; the next one follows after its release."""

    def __init__(self, config: ModelConfig, owner: SequenceBatchOwner, statistics: Statistics, timer: Timer) -> None:
        candidates = config.sequence_batching.oldest.max_candidate_sequences
        super().__init__(candidates or max(config.max_batch_size, 1), owner)
        batcher = DynamicBatcher(_as_dynamic_batching(config), statistics, timer)
        is_ordered = config.sequence_batching.oldest.preserve_ordering
        self._batcher: Scheduler = ResponseOrder(batcher) if is_ordered else batcher
        self._source = self._batcher.source()

    def feed(self, sequence: Sequence) -> None:
        if sequence.waiting and not sequence.running:
            request = self._owner.take(sequence, is_tracked=True)
            self._owner.after_unlock(partial(self._enqueue, request))

    def stop(self) -> None:
        self._batcher.stop()

    def next_batch(self) -> list[QueuedRequest] | None:
        batch = self._source.next_batch()
        return None if batch is None else self._handed_out(batch)

    def wait_for_batch(self) -> bool:
        return self._source.wait_for_batch()

    def take_batch(self) -> list[QueuedRequest]:
        return self._handed_out(self._source.take_batch())

    def _handed_out(self, batch: list[QueuedRequest]) -> list[QueuedRequest]:
        for request in batch:
            self._owner.hand_out(turn_of(request).sequence, request)
        return batch

    def _enqueue(self, request: QueuedRequest) -> None:
        try:
            self._batcher.enqueue(request)
        except TritonError as error:  # stopped in the meantime
            request.fail(error, FailureReason.REJECTED)


def _as_dynamic_batching(config: ModelConfig) -> ModelConfig:
    """The model's configuration with the `oldest` settings expressed as dynamic_batching."""
    oldest = config.sequence_batching.oldest
    batching = ModelConfig()
    batching.CopyFrom(config)
    batching.dynamic_batching.preferred_batch_size.extend(oldest.preferred_batch_size)
    batching.dynamic_batching.max_queue_delay_microseconds = oldest.max_queue_delay_microseconds
    return batching
