"""Drafts of a step: tokens that a row's grammar forces, and guesses from its own text.

For: the engine core, which plans steps without drafts. Does not know: logits, why rows were chosen, what guesses are
made from. Invariants: a draft changes how many tokens a step gives, never which; drafts never preempt a request; a
guess that a grammar forbids is cut off, and a forced token always holds, because it is the only one that is allowed.
"""

from __future__ import annotations

import numpy as np

from ..config import EngineConfig
from ..errors import BadInputError
from ..grammars.constraints import Constraints
from ..grammars.row_constraint import RowConstraint
from ..memory.kv_cache import KVCacheManager
from ..step import Int32Array, StepPlan
from .sequence import Rows
from .speculation import Speculator, accepted_runs
from .steps_in_flight import CompletedStep

MAX_FORCED_TOKENS = 32
"""Of a row in a step."""


class Drafter:
    """One thread calls it; owns the counters."""

    def __init__(
        self, config: EngineConfig, rows: Rows, kv_cache: KVCacheManager, constraints: Constraints, overlaps: bool
    ) -> None:
        """overlaps: whether steps are launched before the last one's tokens are read. The runner looks guesses up
        then."""
        speculation, max_tokens = config.speculative_config, config.max_guess_step_tokens
        self._rows, self._table, self._kv_cache, self._constraints = rows, rows.table, kv_cache, constraints
        self._overlaps = overlaps
        self._max_guess_step_tokens = max_tokens
        self._speculator = Speculator(speculation, rows.table, max_tokens, not overlaps) if speculation else None
        self._max_step_tokens = config.max_num_batched_tokens
        self._max_step_samples = config.max_step_samples
        may_force = not overlaps or config.may_draft
        self._forces = may_force and not config.structured_outputs_config.disable_jump_forward
        self._guesses: Int32Array | None = None
        """Of the latest plan: how many drafts of each of its rows are guesses."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def with_drafts(self, plan: StepPlan) -> StepPlan:
        """The plan with drafts, where there are any and free blocks for them. The table holds them then, or
        PENDING_TOKEN in place of what the runner looks up."""
        self._guesses = None
        if self._forces and self._rows.constraints:
            plan = self._with(plan, self._forced(plan))
        if self._speculator is None or len(plan.rows) >= self._max_guess_step_tokens:
            return plan
        guesses = self._guess(plan)
        drafted = self._with(plan, guesses)
        if drafted is not plan and guesses is not None:
            self._guesses = guesses
        return drafted

    def advance(self, plan: StepPlan, token_ids: Int32Array) -> list[list[int]]:
        """Advances the sampled rows of a plan with drafts by those that hold and the token behind; returns the new
        tokens of each."""
        table, rows = self._table, plan.rows[plan.sample_rows]
        starts, counts = accepted_runs(plan, token_ids, table)
        table.num_tokens[rows] += counts
        # Accepted drafts are in the table already.
        table.token_ids[rows, table.num_tokens[rows] - 1] = token_ids[starts + counts - 1]
        table.num_computed_tokens[rows] = table.num_tokens[rows] - 1
        if self._guesses is not None:
            self._learn(rows, self._guesses[plan.sample_rows], counts - 1)
        tokens = token_ids.tolist()
        return [tokens[a : a + count] for a, count in zip(starts.tolist(), counts.tolist(), strict=True)]

    def read(self, step: CompletedStep) -> None:
        """Learns from a launched step. Constrained rows have no drafts there but those that are forced."""
        if self._speculator is not None and step.num_draft_tokens is not None:
            is_guess = ~np.isin(step.sampled_rows, list(self._rows.constraints))
            rows = np.array(step.sampled_rows, np.int32)
            num_accepted = np.array([len(token_ids) - 1 for token_ids in step.new_token_ids], np.int32)
            self._learn(rows[is_guess], step.num_draft_tokens[is_guess], num_accepted[is_guess])

    def forget(self, row: int) -> None:
        """The row's request is over."""
        if self._speculator is not None:
            self._speculator.forget(row)

    def _learn(self, rows: Int32Array, guesses: Int32Array, num_accepted: Int32Array) -> None:
        assert self._speculator is not None
        self.num_drafts += int(np.count_nonzero(guesses))
        self.num_draft_tokens += int(guesses.sum())
        self.num_accepted_tokens += int(num_accepted[guesses > 0].sum())
        self._speculator.learn(rows, guesses, num_accepted)

    def _with(self, plan: StepPlan, drafts: Int32Array | None) -> StepPlan:
        """The plan with these drafts beside its own, which are of other rows."""
        if drafts is None or not drafts.any():
            return plan
        scheduled = plan.num_scheduled_tokens + drafts
        if not self._kv_cache.reserve(plan.rows, self._table.num_computed_tokens[plan.rows] + scheduled):
            return plan
        if plan.num_draft_tokens is not None:
            drafts = plan.num_draft_tokens + drafts
        return StepPlan(plan.rows, scheduled, plan.sample_rows, drafts)

    def _forced(self, plan: StepPlan) -> Int32Array | None:
        """Writes what constraints force into the table, behind the tokens of rows that generate; how many of each."""
        drafts: Int32Array = np.zeros(len(plan.rows), np.int32)
        room = min(self._max_step_tokens - plan.num_tokens, self._max_step_samples - len(plan.rows))
        for i in (plan.sample_rows & (plan.num_scheduled_tokens == 1)).nonzero()[0].tolist():
            row = int(plan.rows[i])
            if room > 0 and (constraint := self._known(row)) is not None:
                num_tokens = int(self._table.num_tokens[row])
                left = self._rows[row].max_total_tokens - num_tokens - 1
                forced = constraint.forced(min(room, left, MAX_FORCED_TOKENS)) if left > 0 else []
                self._table.token_ids[row, num_tokens : num_tokens + len(forced)] = forced
                drafts[i] = len(forced)
                room -= len(forced)
        return drafts

    def _guess(self, plan: StepPlan) -> Int32Array | None:
        """Writes guesses into the table, behind the tokens of rows that generate; how many of each."""
        assert self._speculator is not None
        room = self._max_guess_step_tokens - plan.num_tokens
        rows = plan.rows.tolist()
        limits = [self._rows[row].max_total_tokens for row in rows]
        for i, row in enumerate(rows):
            has_drafts = plan.num_draft_tokens is not None and plan.num_draft_tokens[i]
            # What bad words ban at a position depends on the token before it; and whether a grammar allows what the
            # runner looks up would be known too late.
            is_unknown = self._overlaps and row in self._rows.constraints
            if has_drafts or is_unknown or self._rows[row].request.sampling.bad_words:
                limits[i] = 0
        guesses = self._speculator.draft(plan, limits, room) if room > 0 else None
        if guesses is not None and self._rows.constraints and not self._overlaps:
            for i in guesses.nonzero()[0].tolist():
                guesses[i] = self._num_possible(int(plan.rows[i]), int(guesses[i]))
        return guesses

    def _num_possible(self, row: int, num_guesses: int) -> int:
        constraint = self._known(row)
        if constraint is None:
            return num_guesses
        num_tokens = int(self._table.num_tokens[row])
        return constraint.num_possible(self._table.token_ids[row, num_tokens : num_tokens + num_guesses].tolist())

    def _known(self, row: int) -> RowConstraint | None:
        """The row's constraint behind its known tokens; None also where these do not follow it: the masks say so."""
        constraint = self._rows.constraints.get(row)
        if constraint is None:
            return None
        try:
            self._constraints.known(row, constraint)
        except BadInputError:
            return None
        return constraint
