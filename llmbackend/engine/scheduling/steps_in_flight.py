"""Steps that are launched and not read yet, and how the row table runs ahead of them.

For: the engine core, where a device works beside the host: the next step is launched before the last one's tokens are
known. Does not know: why rows were chosen, what ends a request, blocks. Invariants: a launched step's rows move on at
once, with PENDING_TOKEN in place of what they sample, as far as they can get: as if all of their drafts were accepted.
A step's results are applied once, in launch order, and only to rows that still belong to the requests for which it was
launched; a row with fewer tokens than that moves back, and with it what later steps compute of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import numpy as np

from ..messages import TokenLogprobs
from ..step import NO_TOKEN, PENDING_TOKEN, BoolArray, Int32Array, OverlappingRunner, SampledTokens, StepPlan
from .sequence import Rows


@dataclass(slots=True)
class CompletedStep:
    """The results of a step for the rows whose requests still live, after the table has moved on.

    rows                 int32 [n]
    num_computed_tokens  int32 [n]  tokens of each row whose KV is computed
    sampled_rows         the rows that sampled
    positions            of the first new token of each of them
    new_token_ids        one or more for each of them
    logprobs             as in SampledTokens; may have other rows, too
    errors               as in SampledTokens; may have other rows, too
    refusals             as in SampledTokens; may have other rows, too
    planned_s            when the step was begun, by the core's clock
    forward_s            see SampledTokens
    sample_s             see SampledTokens
    prompt_logprobs      as in SampledTokens; may have other rows, too
    num_draft_tokens     int32 [sampled rows]; None where the step had none, or was not launched
    """

    rows: Int32Array
    num_computed_tokens: Int32Array
    sampled_rows: list[int]
    positions: list[int]
    new_token_ids: list[list[int]]
    planned_s: float
    logprobs: Mapping[int, Items[TokenLogprobs]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)
    refusals: Mapping[int, str] = field(default_factory=dict)
    forward_s: float = 0.0
    sample_s: float = 0.0
    prompt_logprobs: Mapping[int, Items[TokenLogprobs]] = field(default_factory=dict)
    num_draft_tokens: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A plan, and its rows at its launch, corrected by what was read since.

    generation           int32 [n]  see Rows.generation
    num_tokens           int32 [n]  that they had
    num_computed_tokens  int32 [n]  computed once the step has run
    planned_s            when the step was begun, by the core's clock
    """

    step_id: int
    plan: StepPlan
    generation: Int32Array
    num_tokens: Int32Array
    num_computed_tokens: Int32Array
    planned_s: float

    @property
    def num_draft_tokens(self) -> Int32Array:
        """int32 [n]"""
        drafts = self.plan.num_draft_tokens
        return np.zeros(len(self.plan.rows), np.int32) if drafts is None else drafts

    def moved_back(self, by_row: Int32Array) -> _LaunchedStep:
        """by_row: int32 [max_num_seqs]"""
        by = by_row[self.plan.rows]
        return replace(self, num_tokens=self.num_tokens - by, num_computed_tokens=self.num_computed_tokens - by)


class StepsInFlight:
    """Owner of the launched steps of one runner."""

    def __init__(self, runner: OverlappingRunner, rows: Rows) -> None:
        self._runner = runner
        self._rows = rows
        self._table = rows.table
        self._steps: deque[_LaunchedStep] = deque()
        self._last_step_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        return len(self._steps) < self._runner.max_steps_in_flight

    def launch(self, plan: StepPlan, planned_s: float) -> None:
        """Raises what the runner raises; then nothing has changed."""
        self._runner.launch(self._last_step_id + 1, plan, self._table)
        self._last_step_id += 1
        table, rows = self._table, plan.rows
        num_tokens, sampled = table.num_tokens[rows], rows[plan.sample_rows]
        table.token_ids[plan.samples(table)] = PENDING_TOKEN
        table.num_computed_tokens[rows] += plan.num_scheduled_tokens
        table.num_tokens[sampled] += 1
        if plan.num_draft_tokens is not None:
            table.num_tokens[rows] += plan.num_draft_tokens
            table.num_pending_drafts[rows] += plan.num_draft_tokens
        generation, reach = self._rows.generation[rows], table.num_computed_tokens[rows]
        self._steps.append(_LaunchedStep(self._last_step_id, plan, generation, num_tokens, reach, planned_s))

    def collect(self) -> CompletedStep:
        """Waits for the oldest step. Raises what the runner raises, or RuntimeError when the results are another step's
        or not as planned; the engine cannot go on then."""
        step, (step_id, sampled) = self._steps[0], self._runner.collect()
        plan, token_ids = step.plan, sampled.token_ids
        if step_id != step.step_id or len(token_ids) != plan.num_samples:
            raise RuntimeError(
                f"the runner gave {len(token_ids)} tokens of step {step_id}, "
                f"expected {plan.num_samples} tokens of step {step.step_id}"
            )
        self._steps.popleft()
        sampled = with_refusals(plan, sampled)
        is_live = self._rows.generation[plan.rows] == step.generation
        if plan.num_draft_tokens is not None:
            return self._read_drafts(step, sampled, is_live)
        samples = is_live & plan.sample_rows
        rows, positions, token_ids = plan.rows[samples], step.num_tokens[samples], token_ids[is_live[plan.sample_rows]]
        self._table.token_ids[rows, positions] = token_ids
        return _completed(step, sampled, is_live, token_ids[:, np.newaxis].tolist())

    def _read_drafts(self, step: _LaunchedStep, sampled: SampledTokens, is_live: BoolArray) -> CompletedStep:
        """Applies the tokens of a step with drafts: of each row up to the first that differs from its draft."""
        plan, table, drafts = step.plan, self._table, step.num_draft_tokens
        accepted = _num_accepted(plan, sampled)
        rows, back = plan.rows[is_live], (drafts - accepted)[is_live]
        table.num_tokens[rows] -= back
        table.num_computed_tokens[rows] -= back
        table.num_pending_drafts[rows] -= drafts[is_live]
        by_row = np.zeros(table.max_num_seqs, np.int32)
        by_row[rows] = back
        self._steps = deque(later.moved_back(by_row) for later in self._steps)
        step = replace(step, num_computed_tokens=step.num_computed_tokens - (drafts - accepted))
        new_token_ids = []
        ends = np.cumsum(np.where(plan.sample_rows, drafts + 1, 0))
        for i in (is_live & plan.sample_rows).nonzero()[0].tolist():
            first, count, position = int(ends[i] - drafts[i] - 1), int(accepted[i]) + 1, int(step.num_tokens[i])
            token_ids = sampled.token_ids[first : first + count]
            table.token_ids[plan.rows[i], position : position + count] = token_ids
            new_token_ids.append(token_ids.tolist())
        return _completed(step, sampled, is_live, new_token_ids)


def _num_accepted(plan: StepPlan, sampled: SampledTokens) -> Int32Array:
    """Of each row of a plan with drafts, int32 [n]: how many of them are accepted."""
    assert plan.num_draft_tokens is not None
    drafts, accepted = plan.num_draft_tokens, np.zeros(len(plan.rows), np.int32)
    if sampled.num_accepted_tokens is None or len(sampled.num_accepted_tokens) != np.count_nonzero(drafts):
        raise RuntimeError(f"the runner does not say which drafts of {np.count_nonzero(drafts)} rows are accepted")
    accepted[drafts > 0] = sampled.num_accepted_tokens
    ends = np.cumsum(np.where(plan.sample_rows, drafts + 1, 0))
    # What a mask leaves no token for, behind accepted drafts: the run ends before it, and the next step begins with it.
    accepted -= (accepted > 0) & (sampled.token_ids[ends - drafts - 1 + accepted] == NO_TOKEN)
    return accepted


def _completed(
    step: _LaunchedStep, sampled: SampledTokens, is_live: BoolArray, new_token_ids: list[list[int]]
) -> CompletedStep:
    """new_token_ids: of the live rows that sample."""
    plan, samples = step.plan, is_live & step.plan.sample_rows
    return CompletedStep(
        plan.rows[is_live],
        step.num_computed_tokens[is_live],
        plan.rows[samples].tolist(),
        step.num_tokens[samples].tolist(),
        new_token_ids,
        step.planned_s,
        sampled.logprobs,
        sampled.errors,
        sampled.refusals,
        sampled.forward_s,
        sampled.sample_s,
        sampled.prompt_logprobs,
        None if plan.num_draft_tokens is None else plan.num_draft_tokens[samples],
    )


def with_refusals(plan: StepPlan, sampled: SampledTokens) -> SampledTokens:
    """What the step sampled, without the tokens of samples that had none to choose from. A row's first sample without
    one is the row's refusal; a later one is NO_TOKEN, since the drafts before it may be wrong."""
    errors = plan.masks.result().errors if plan.masks is not None else {}
    if not errors:
        return sampled
    counts = plan.num_draft_tokens[plan.sample_rows] + 1 if plan.num_draft_tokens is not None else 1
    rows = np.repeat(plan.rows[plan.sample_rows], counts)
    token_ids, refusals = sampled.token_ids.copy(), dict[int, str]()
    for sample, text in errors.items():
        if sample == 0 or rows[sample - 1] != rows[sample]:
            refusals[int(rows[sample])] = text
        else:
            token_ids[sample] = NO_TOKEN
    return replace(sampled, token_ids=token_ids, refusals=refusals)
