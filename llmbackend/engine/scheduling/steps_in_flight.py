"""Steps that are launched but not read yet, and how the row table runs ahead of them.

An OverlappingRunner gets the next step before the tokens of the last one are known; with any other runner, at most one
step is in flight, and launching computes it. Independent of why rows were chosen, what ends a request, and blocks.
Invariants: the rows of a launched step advance at once, as if all their drafts were accepted, with PENDING_TOKEN in
place of the sampled tokens. A step's results are applied once, in launch order, and only to rows that still belong to
the requests for which it was launched. If drafts of a row were rejected, its token counts are reduced, also those that
later steps in flight have recorded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from ..step import (
    NO_TOKEN,
    PENDING_TOKEN,
    BoolArray,
    Int32Array,
    OverlappingRunner,
    RowTable,
    Runner,
    SampledTokens,
    StepPlan,
)
from .sequence import Rows


@dataclass(slots=True)
class CompletedStep:
    """The results of a step for rows whose requests are still live, after the table was updated.

    rows                 int32 [n]
    num_computed_tokens  int32 [n]  tokens of each row whose KV is computed
    sampled_rows         the rows that sampled
    positions            of the first new token of each of them
    new_token_ids        at least one for each of them
    planned_s            when the step was begun, by the core's clock
    sampled              the runner's result, with refusals; may contain other rows
    num_guesses          int32 [sampled rows]  drafts that were guesses; None if the step had none
    """

    rows: Int32Array
    num_computed_tokens: Int32Array
    sampled_rows: list[int]
    positions: list[int]
    new_token_ids: list[list[int]]
    planned_s: float
    sampled: SampledTokens
    num_guesses: Int32Array | None


class ComputingLauncher:
    """For runners whose steps do not overlap: a launch computes the step, whose drafts are all in the table."""

    max_steps_in_flight = 1

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def launch(self, step_id: int, plan: StepPlan, table: RowTable) -> None:
        sampled = self._runner.execute(plan, table)
        if plan.num_draft_tokens is not None and len(sampled.token_ids) == plan.num_samples:
            sampled = replace(sampled, num_accepted_tokens=num_equal_drafts(plan, sampled.token_ids, table))
        self._computed = step_id, sampled

    def collect(self) -> tuple[int, SampledTokens]:
        return self._computed


@dataclass(slots=True)
class _LaunchedStep:
    """A plan, and its rows at launch, corrected by what has been read since.

    generation           int32 [n]  see Rows.generation
    num_tokens           int32 [n]  tokens known at launch
    num_computed_tokens  int32 [n]  tokens computed once the step has run
    planned_s            when the step was begun, by the core's clock
    guesses              int32 [n]  drafts that are guesses; None if there are none
    """

    step_id: int
    plan: StepPlan
    generation: Int32Array
    num_tokens: Int32Array
    num_computed_tokens: Int32Array
    planned_s: float
    guesses: Int32Array | None

    def move_back(self, by_row: Int32Array) -> None:
        """by_row: int32 [max_num_seqs]"""
        self.num_tokens -= by_row[self.plan.rows]
        self.num_computed_tokens -= by_row[self.plan.rows]


class StepsInFlight:
    """Owns the launched steps of one runner."""

    def __init__(self, runner: OverlappingRunner | ComputingLauncher, rows: Rows) -> None:
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

    def launch(self, plan: StepPlan, planned_s: float, guesses: Int32Array | None = None) -> None:
        """guesses: int32 [rows], drafts of the plan that are guesses. Raises what the runner raises; nothing has
        changed then."""
        self._runner.launch(self._last_step_id + 1, plan, self._table)
        self._advance(plan, planned_s, guesses)

    def collect(self) -> CompletedStep:
        """Waits for the oldest step. Raises what the runner raises, or RuntimeError if the results belong to another
        step or do not match the plan; the engine cannot continue then."""
        step_id, sampled = self._runner.collect()
        return self._read(step_id, sampled)

    def apply(self, plan: StepPlan, planned_s: float, sampled: SampledTokens) -> CompletedStep:
        """Applies a step without drafts that was computed elsewhere, while nothing is in flight."""
        self._advance(plan, planned_s, None)
        return self._read(self._last_step_id, sampled)

    def _advance(self, plan: StepPlan, planned_s: float, guesses: Int32Array | None) -> None:
        self._last_step_id += 1
        table, rows = self._table, plan.rows
        num_tokens, reach = table.num_tokens[rows], table.num_computed_tokens[rows] + plan.num_scheduled_tokens
        table.token_ids[plan.samples(table)] = PENDING_TOKEN
        table.num_computed_tokens[rows] = reach
        if plan.num_draft_tokens is None:
            table.num_tokens[rows] = num_tokens + plan.sample_rows
        else:
            table.num_tokens[rows] = num_tokens + plan.sample_rows + plan.num_draft_tokens
            table.num_pending_drafts[rows] += plan.num_draft_tokens
        generation = self._rows.generation[rows]
        self._steps.append(_LaunchedStep(self._last_step_id, plan, generation, num_tokens, reach, planned_s, guesses))

    def _read(self, step_id: int, sampled: SampledTokens) -> CompletedStep:
        step = self._steps[0]
        plan, token_ids = step.plan, sampled.token_ids
        if step_id != step.step_id or len(token_ids) != plan.num_samples:
            raise RuntimeError(
                f"the runner returned {len(token_ids)} tokens of step {step_id}, "
                f"expected {plan.num_samples} tokens of step {step.step_id}"
            )
        self._steps.popleft()
        sampled = _with_refusals(plan, sampled)
        is_live = self._rows.generation[plan.rows] == step.generation
        if plan.num_draft_tokens is not None:
            return self._read_drafts(step, sampled, is_live)
        samples = is_live & plan.sample_rows
        rows, positions, token_ids = plan.rows[samples], step.num_tokens[samples], token_ids[is_live[plan.sample_rows]]
        self._table.token_ids[rows, positions] = token_ids
        return _completed(step, sampled, is_live, rows, positions, token_ids[:, np.newaxis].tolist())

    def _read_drafts(self, step: _LaunchedStep, sampled: SampledTokens, is_live: BoolArray) -> CompletedStep:
        """Applies the tokens of a step with drafts: of each row, up to the first that differs from its draft."""
        plan, table, drafts = step.plan, self._table, step.plan.num_draft_tokens
        assert drafts is not None
        accepted = num_accepted(plan, sampled)
        rows, back = plan.rows[is_live], (drafts - accepted)[is_live]
        table.num_tokens[rows] -= back
        table.num_computed_tokens[rows] -= back
        table.num_pending_drafts[rows] -= drafts[is_live]
        by_row = np.zeros(table.max_num_seqs, np.int32)
        by_row[rows] = back
        for later in self._steps:
            later.move_back(by_row)
        step.num_computed_tokens -= drafts - accepted
        new_token_ids, samples = [], is_live & plan.sample_rows
        ends = np.cumsum(np.where(plan.sample_rows, drafts + 1, 0))
        for i in samples.nonzero()[0].tolist():
            first, count, position = int(ends[i] - drafts[i] - 1), int(accepted[i]) + 1, int(step.num_tokens[i])
            token_ids = sampled.token_ids[first : first + count]
            table.token_ids[plan.rows[i], position : position + count] = token_ids
            new_token_ids.append(token_ids.tolist())
        guesses = None if step.guesses is None else step.guesses[samples]
        rows, positions = plan.rows[samples], step.num_tokens[samples]
        return _completed(step, sampled, is_live, rows, positions, new_token_ids, guesses)


def num_equal_drafts(plan: StepPlan, token_ids: Int32Array, table: RowTable) -> Int32Array:
    """How many leading drafts match the sampled tokens, for each row with drafts; int32, as
    SampledTokens.num_accepted_tokens. The drafts are in the table."""
    assert plan.num_draft_tokens is not None
    counts = plan.num_draft_tokens[plan.sample_rows] + 1
    ends = np.cumsum(counts, dtype=np.int32)
    rows, positions = plan.samples(table)
    differs = token_ids != table.token_ids[rows, np.minimum(positions, table.max_model_len - 1)]
    differs[ends - 1] = True  # after the last draft
    found, starts = differs.nonzero()[0], ends - counts
    equal: Int32Array = (found[np.searchsorted(found, starts)] - starts).astype(np.int32)
    return equal[counts > 1]


def num_accepted(plan: StepPlan, sampled: SampledTokens) -> Int32Array:
    """How many drafts of each row are accepted; int32 [rows], for a plan with drafts."""
    assert plan.num_draft_tokens is not None
    drafts, accepted = plan.num_draft_tokens, np.zeros(len(plan.rows), np.int32)
    if sampled.num_accepted_tokens is None or len(sampled.num_accepted_tokens) != np.count_nonzero(drafts):
        raise RuntimeError(f"the runner does not say which drafts of {np.count_nonzero(drafts)} rows are accepted")
    accepted[drafts > 0] = sampled.num_accepted_tokens
    starts = np.cumsum(np.where(plan.sample_rows, drafts + 1, 0)) - drafts - 1
    # If the mask leaves no token after accepted drafts, the run ends before that position, and the next step starts
    # with it. What was sampled there without a mask may equal the next draft.
    missing = np.append(np.flatnonzero(sampled.token_ids == NO_TOKEN), len(sampled.token_ids))
    num_before = missing[np.searchsorted(missing, starts)] - starts
    return np.where(accepted > 0, np.minimum(accepted, num_before - 1), accepted).astype(np.int32)


def _completed(
    step: _LaunchedStep,
    sampled: SampledTokens,
    is_live: BoolArray,
    sampled_rows: Int32Array,
    positions: Int32Array,
    new_token_ids: list[list[int]],
    num_guesses: Int32Array | None = None,
) -> CompletedStep:
    rows, num_computed_tokens = step.plan.rows, step.num_computed_tokens
    if np.count_nonzero(is_live) < len(rows):
        rows, num_computed_tokens = rows[is_live], num_computed_tokens[is_live]
    lists = sampled_rows.tolist(), positions.tolist(), new_token_ids
    return CompletedStep(rows, num_computed_tokens, *lists, step.planned_s, sampled, num_guesses)


def _with_refusals(plan: StepPlan, sampled: SampledTokens) -> SampledTokens:
    """The step's result without the tokens of samples that had none to choose from. A row's first such sample is the
    row's refusal; a later one is NO_TOKEN, because the drafts before it may be wrong."""
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
