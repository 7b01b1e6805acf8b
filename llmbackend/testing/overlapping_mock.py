"""The mock model on a simulated device: a thread that executes launched steps in order while the host continues.

For tests of steps in flight without an accelerator. Invariants: a step copies everything it needs when launched and
never reads the host's table, which may have changed when it runs; of each row, the device keeps only the position and
id of the last sampled token; everything else is in KV slots.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.messages import InferRequest, TokenLogprobs
from llmbackend.engine.step import (
    PENDING_TOKEN,
    Int32Array,
    KVCopies,
    LookupLengths,
    RowTable,
    SampledTokens,
    StepPlan,
    look_up,
)
from llmbackend.engine.token_masks import TokenMasks, Words

from .mock_model import MockRunner, PromptToken, allowed_tokens, context_slots, prompt_tokens


@dataclass(frozen=True, slots=True)
class _DeviceRow:
    """A row of a step when launched.

    num_tokens  without this step's drafts, and as if all earlier drafts were accepted
    may_differ  whether the host does not know yet which earlier drafts were accepted
    token_ids   int32 [n]: tokens to compute, this step's drafts last; some may be PENDING_TOKEN
    slots       int32: those of all positions from 0
    allowed     allowed tokens of each sample; empty for a row that does not sample
    """

    row: int
    num_tokens: int
    may_differ: bool
    num_computed_tokens: int
    token_ids: Int32Array
    num_drafts: int
    slots: Int32Array
    request: InferRequest
    allowed: list[Words | None]


@dataclass(frozen=True, slots=True)
class DeviceStep:
    rows: list[_DeviceRow]
    prompt_tokens: list[PromptToken]


class OverlappingMockRunner(MockRunner):
    """An OverlappingRunner. `execute` may read the host's table, because the host waits for it."""

    launches_drafts = True

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.max_steps_in_flight = max(config.mock_steps_in_flight, 1)
        speculation = config.speculative_config
        self._lengths = None if speculation is None else LookupLengths.of(speculation)
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llm-mock-device")
        self._launched: deque[tuple[int, Future[SampledTokens]]] = deque()
        self._newest: dict[int, tuple[int, int]] = {}
        """State of the device: position and id of each row's last sampled token."""

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        assert not self._launched, "a step is executed while others are in flight"
        return self._device.submit(super().execute, plan, table).result()

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        assert len(self._launched) < self.max_steps_in_flight, "more steps are launched than may be in flight"
        step = DeviceStep(self._rows_of(plan, table), prompt_tokens(plan, table))
        self._launched.append((step_id, self._device.submit(self._compute, step)))

    def collect(self) -> tuple[int, SampledTokens]:
        step_id, result = self._launched.popleft()
        return step_id, result.result()

    def copy_blocks(self, copies: KVCopies) -> None:
        self._device.submit(super().copy_blocks, copies)

    def close(self) -> None:
        self._device.shutdown(cancel_futures=True)

    def _rows_of(self, plan: StepPlan, table: RowTable) -> list[_DeviceRow]:
        masks = None if plan.masks is None else plan.masks.result()
        drafts = [0] * len(plan.rows) if plan.num_draft_tokens is None else plan.num_draft_tokens.tolist()
        rows: list[_DeviceRow] = []
        num_samples = 0
        for i, row in enumerate(plan.rows.tolist()):
            first = int(table.num_computed_tokens[row])
            reach = first + int(plan.num_scheduled_tokens[i])
            count = drafts[i] + 1 if plan.sample_rows[i] else 0
            one = _DeviceRow(
                row=row,
                num_tokens=int(table.num_tokens[row]),
                may_differ=bool(table.num_pending_drafts[row]),
                num_computed_tokens=first,
                token_ids=table.token_ids[row, first:reach].copy(),
                num_drafts=drafts[i],
                slots=context_slots(row, reach, table),
                request=self._requests[row],
                allowed=[_copied(masks, num_samples + j) for j in range(count)],
            )
            rows.append(one)
            num_samples += count
        return rows

    def _compute(self, step: DeviceStep) -> SampledTokens:
        """Runs on the device."""
        start_s = time.perf_counter()
        if self._step_s:
            time.sleep(self._step_s)
        written = [self._write(one) for one in step.rows]
        token_ids: list[int] = []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        accepted: list[int] = []
        for one, (length, drafts) in zip(step.rows, written, strict=True):
            sampled = [self._sample_row(one, length + j, allowed) for j, allowed in enumerate(one.allowed)]
            token_ids += [token_id for token_id, _ in sampled]
            if found := [entry for _, entry in sampled if entry is not None]:
                logprobs[one.row] = found
            if sampled:
                count = _num_equal([token_id for token_id, _ in sampled], drafts)
                self._newest[one.row] = length + count, sampled[count][0]
                accepted += [count] if drafts else []
        return SampledTokens(
            np.array(token_ids, np.int32),
            logprobs,
            forward_s=time.perf_counter() - start_s,
            prompt_logprobs=self._of_prompts(step.prompt_tokens),
            num_accepted_tokens=np.array(accepted, np.int32) if accepted else None,
        )

    def _write(self, one: _DeviceRow) -> tuple[int, list[int]]:
        """Writes the row's tokens to their slots; returns their number before this step, and the drafts."""
        length = self._newest[one.row][0] + 1 if one.may_differ else one.num_tokens
        first = one.num_computed_tokens - (one.num_tokens - length)
        tokens, num_known = one.token_ids.copy(), len(one.token_ids) - one.num_drafts
        for i in (tokens[:num_known] == PENDING_TOKEN).nonzero()[0].tolist():
            tokens[i] = self._sampled_at(one.row, first + i)
        self._slots[one.slots[first : first + num_known]] = tokens[:num_known]
        drafts = tokens[num_known:]
        if one.num_drafts and drafts[0] == PENDING_TOKEN:
            assert self._lengths is not None, "there are drafts to look up and no speculation"
            drafts = look_up(self._slots[one.slots[:length]], one.num_drafts, self._lengths)
        self._slots[one.slots[length : length + one.num_drafts]] = drafts
        return length, drafts.tolist()

    def _sample_row(self, one: _DeviceRow, position: int, allowed: Words | None) -> tuple[int, TokenLogprobs | None]:
        return self._sample(self._slots[one.slots[:position]], one.request, allowed)

    def _sampled_at(self, row: int, position: int) -> int:
        newest_position, token_id = self._newest[row]
        if newest_position != position:
            raise RuntimeError(
                f"token {position} of row {row} is pending, but the device sampled token {newest_position} last"
            )
        return token_id


def _copied(masks: TokenMasks | None, sample: int) -> Words | None:
    """A copy, because the host reuses the masks' memory."""
    allowed = allowed_tokens(masks, sample)
    return None if allowed is None else allowed.copy()


def _num_equal(token_ids: list[int], drafts: list[int]) -> int:
    """How many leading tokens equal their drafts."""
    pairs = zip(token_ids, drafts, strict=False)
    return next((i for i, (token_id, draft) in enumerate(pairs) if token_id != draft), len(drafts))
