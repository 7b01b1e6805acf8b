"""Steps that are launched and not read yet, and how the row table runs ahead of them.

For: the engine core, where a device works beside the host: the next step is launched before the last one's tokens are
known. Does not know: why rows were chosen, what ends a request, blocks. Invariants: a launched step's rows move on at
once, with PENDING_TOKEN in place of what they sample; a step's results are applied once, in launch order, and only to
rows that still belong to the requests for which it was launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import numpy as np

from ..infer_request import TokenLogprobs
from ..step import NO_TOKEN, PENDING_TOKEN, Int32Array, OverlappingRunner, SampledTokens, StepPlan
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


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A plan, and its rows at its launch.

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
        table.num_computed_tokens[rows] += plan.num_scheduled_tokens
        table.token_ids[sampled, num_tokens[plan.sample_rows]] = PENDING_TOKEN
        table.num_tokens[sampled] += 1
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
        samples = is_live & plan.sample_rows
        rows, positions, token_ids = plan.rows[samples], step.num_tokens[samples], token_ids[is_live[plan.sample_rows]]
        self._table.token_ids[rows, positions] = token_ids
        return CompletedStep(
            plan.rows[is_live],
            step.num_computed_tokens[is_live],
            rows.tolist(),
            positions.tolist(),
            token_ids[:, np.newaxis].tolist(),
            step.planned_s,
            sampled.logprobs,
            sampled.errors,
            sampled.refusals,
            sampled.forward_s,
            sampled.sample_s,
            sampled.prompt_logprobs,
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
