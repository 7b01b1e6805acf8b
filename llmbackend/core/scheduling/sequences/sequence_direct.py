"""The direct strategy: a sequence has a slot of its own in every batch, which is also its row.

For: the sequence batcher, for models whose backend keeps a sequence's state by the row of the batch. Does not know:
correlation ids, clients. Invariants: a batch has at most one request of each sequence, at the position of its slot; a
slot that has no request, or one of another shape, is filled with a null request, up to the last slot that has one; all
requests of a batch have equal shapes.
Source: DirectSequenceBatch of Triton's sequence batcher.
"""

from __future__ import annotations

import math
import threading
import time

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.scheduling.equal_inputs import EqualInputs
from llmbackend.waiting.timer import LONGEST_SLEEP_S

from .null_request import NullOwner, null_request
from .sequence import Sequence
from .sequence_controls import SequenceControls
from .sequence_lane import LaneOwner, SequenceLane
from .sequence_state import StateRules

Ready = dict[int, Sequence]
"""By slot number, in order: sequences with a request that waits."""


class SequenceDirect(SequenceLane):
    def __init__(
        self,
        config: ModelConfig,
        owner: LaneOwner,
        lock: threading.Lock,
        controls: SequenceControls,
        states: StateRules,
        null_owner: NullOwner,
    ) -> None:
        super().__init__(max(config.max_batch_size, 1), owner)
        direct = config.sequence_batching.direct
        self._max_delay_ns: int = direct.max_queue_delay_microseconds * 1000
        # A float of 32 bits: 0.1 of ten slots is one, not a little more.
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

    def next_batch(self) -> list[InferRequest] | None:
        with self._owner.locked():
            ready = self._await_ready()
            return self._batch(ready) if ready else None

    def wait_for_batch(self) -> bool:
        with self._owner.locked():
            return bool(self._await_ready())

    def take_batch(self) -> list[InferRequest]:
        with self._owner.locked():
            ready = self._ready()
            return self._batch(ready) if ready and not self._delay_left_s(ready) else []

    def _ready(self) -> Ready:
        return {slot: sequence for slot, sequence in self.slots.in_order() if sequence.waiting}

    def _await_ready(self) -> Ready:
        """Waits until a batch is due; empty when stopped."""
        while True:
            ready = self._ready()
            wait_s = self._delay_left_s(ready) if ready else None
            if (ready and not wait_s) or (not ready and self._is_stopped):
                return ready
            self._changed.wait(wait_s)

    def _delay_left_s(self, ready: Ready) -> float:
        """How long to wait for more sequences; 0 = not at all."""
        if not self._max_delay_ns or len(ready) >= self._enough or self._is_stopped:
            return 0.0
        oldest_ns = min(sequence.waiting[0].queue_start_ns for sequence in ready.values())
        left_ns = oldest_ns + self._max_delay_ns - time.monotonic_ns()
        return min(max(left_ns, 0) / 1e9, LONGEST_SLEEP_S)

    def _batch(self, ready: Ready) -> list[InferRequest]:
        """The first ready sequence decides on the shapes. A slot is given on only after the whole batch was taken, so
        that the next sequence in it does not get into this batch."""
        shapes = self._equal_inputs.key(next(iter(ready.values())).waiting[0])
        taken: dict[int, InferRequest] = {}
        for slot, sequence in ready.items():
            if self._equal_inputs.key(sequence.waiting[0]) == shapes:
                taken[slot] = self._owner.take(sequence, is_tracked=False)
                self._owner.hand_out(sequence, taken[slot])
        for slot in taken:
            self._owner.settle(ready[slot])
        pattern = next(iter(taken.values()))
        return [taken.get(slot) or self._null(pattern) for slot in range(max(ready) + 1)]

    def _null(self, pattern: InferRequest) -> InferRequest:
        request = null_request(self._null_owner, pattern, self._controls.not_ready())
        request.states = self._states.new_states()  # nobody's
        return request
