"""The mock model on a device of its own: a thread that runs launched steps in order, on what they were launched with.

For: everything that steps in flight need to be tested for, without an accelerator. Does not know: torch. Invariants: a
step takes copies of all it needs when it is launched, and never sees the host's table, which has moved on by then; what
the host says of a token that it has not read is only PENDING_TOKEN, and the device then takes what it sampled itself,
at that very position.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..config import EngineConfig
from ..infer_request import InferRequest, TokenLogprobs
from ..step import PENDING_TOKEN, Int32Array, KVCopies, RowTable, SampledTokens, StepPlan
from .mock_model import MockRunner, context_slots, scheduled_slots


@dataclass(frozen=True, slots=True)
class _Sample:
    """A token to sample: its row and position, the slots of all tokens before it, and its request."""

    row: int
    position: int
    context_slots: Int32Array
    request: InferRequest


@dataclass(frozen=True, slots=True)
class _DeviceStep:
    """rows, positions, slots, token_ids: int32 [num_tokens], of the tokens to compute; some may be pending."""

    rows: Int32Array
    positions: Int32Array
    slots: Int32Array
    token_ids: Int32Array
    samples: list[_Sample]


class OverlappingMockRunner(MockRunner):
    """An OverlappingRunner and an OffloadingRunner. `execute` sees the host's table, which stands still while it waits
    for the device."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.max_steps_in_flight = max(config.mock_steps_in_flight, 1)
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llm-mock-device")
        self._launched: deque[tuple[int, Future[SampledTokens]]] = deque()
        self._newest: dict[int, tuple[int, int]] = {}
        """The device's own: by row, position and id of the token that it sampled last."""

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        assert not self._launched, "a step is executed while others are in flight"
        return self._device.submit(super().execute, plan, table).result()

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        assert len(self._launched) < self.max_steps_in_flight, "more steps are launched than may be in flight"
        assert plan.num_draft_tokens is None, "drafts are launched"
        rows, positions, slots = scheduled_slots(plan, table)
        samples = [
            _Sample(row, position, context_slots(row, position, table), self._requests[row])
            for row, position in zip(*(array.tolist() for array in plan.samples(table)), strict=True)
        ]
        step = _DeviceStep(rows, positions, slots, table.token_ids[rows, positions], samples)
        self._launched.append((step_id, self._device.submit(self._compute, step)))

    def collect(self) -> tuple[int, SampledTokens]:
        step_id, result = self._launched.popleft()
        return step_id, result.result()

    def copy_blocks(self, copies: KVCopies) -> None:
        self._device.submit(super().copy_blocks, copies)

    def close(self) -> None:
        self._device.shutdown(cancel_futures=True)

    def _compute(self, step: _DeviceStep) -> SampledTokens:
        """On the device."""
        start_s = time.perf_counter()
        if self._step_s:
            time.sleep(self._step_s)
        tokens = step.token_ids.copy()
        for i in (tokens == PENDING_TOKEN).nonzero()[0].tolist():
            tokens[i] = self._sampled_at(int(step.rows[i]), int(step.positions[i]))
        self._slots[step.slots] = tokens
        token_ids: list[int] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for one in step.samples:
            token_id, row_logprobs = self._sample(self._slots[one.context_slots], one.request)
            token_ids.append(token_id)
            self._newest[one.row] = one.position, token_id
            if row_logprobs is not None:
                logprobs[one.row] = [row_logprobs]
        return SampledTokens(np.array(token_ids, np.int32), logprobs, forward_s=time.perf_counter() - start_s)

    def _sampled_at(self, row: int, position: int) -> int:
        newest_position, token_id = self._newest[row]
        if newest_position != position:
            raise RuntimeError(
                f"token {position} of row {row} is pending, but the device sampled token {newest_position} last"
            )
        return token_id
