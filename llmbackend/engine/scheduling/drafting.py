"""Drafts for a step: tokens forced by a row's grammar, and n-gram guesses from the row's own text.

The engine core plans steps without drafts and adds them here. Invariants: drafts change only how many tokens a step
yields, never which; drafts never preempt a request; a guess that a grammar forbids is dropped, and a forced token is
always accepted because no other is allowed. The state of the guesses may be lost or wrong at any time, so recovery and
preemption need not preserve it. Only rows that decode in a small step cost time.

A guess (n-gram speculation) is what followed the last occurrence of the row's last n tokens, for the largest n that has
occurred before. A row whose guesses are accepted gets more of them, up to num_speculative_tokens. A guess costs at most
about 1 / max_step_tokens of a step, and an accepted one saves one row's share of a step. So a row drafts freely while
more than rows / max_step_tokens of its guesses are accepted, and otherwise retries after pauses that double.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import EngineConfig, SpeculativeConfig
from ..errors import BadInputError
from ..grammars.constraints import Constraints
from ..grammars.row_constraint import RowConstraint
from ..memory.kv_cache import KVCacheManager
from ..step import PENDING_TOKEN, Int32Array, RowTable, StepPlan
from .sequence import Rows
from .steps_in_flight import CompletedStep

MAX_INDEXED_TOKENS = 8192
"""A row that starts drafting indexes at most this many of its last tokens, which limits its index to about 5 MB."""
MAX_PAUSE_STEPS = 32
"""Rows whose drafts do not pay off retry rarely: all of them together make one attempt in this many steps."""
MAX_LOOKUP_PAUSE_STEPS = 2
"""The same if the runner looks drafts up. Whether a text repeats is then unknown until a draft is tried, and most
attempts fail because it does not yet."""
FIRST_ACCEPTED_SHARE, SAMPLE_WEIGHT = 0.5, 0.25
"""Initial acceptance rate assumed for a new row, and the weight of each attempt in the running mean."""


@dataclass(slots=True)
class _RowState:
    """One row's index, and the outcome of its drafts.

    latest          by n: each n-gram followed by a token -> the position of that token at its last occurrence
    indexed_end     n-grams that end at or before this position are in the index
    width           drafts of the next attempt
    accepted_share  running mean of its acceptance rate, 0 to 1
    pause_tokens    tokens that the row waits after its last attempt; 0 while drafts pay off
    resume_at       number of tokens at which it drafts again
    """

    latest: dict[int, dict[tuple[int, ...], int]]
    indexed_end: int
    width: int = 1
    accepted_share: float = FIRST_ACCEPTED_SHARE
    pause_tokens: int = 0
    resume_at: int = 0


class Speculator:
    """Owns the state of drafting rows. One thread calls it."""

    def __init__(self, config: SpeculativeConfig, table: RowTable, max_step_tokens: int, looks_up: bool = True) -> None:
        """max_step_tokens: size of the largest step with drafts, these included. looks_up: whether this class looks
        drafts up. If the runner does, this class only decides how many; an attempt that finds nothing then costs as
        much as one that is rejected."""
        self._table = table
        self._looks_up = looks_up
        self._max_pause_steps = MAX_PAUSE_STEPS if looks_up else MAX_LOOKUP_PAUSE_STEPS
        self._num_drafts_max = config.num_speculative_tokens
        self._max_step_tokens = max_step_tokens
        self._lengths = range(config.lookup_min, config.lookup_max + 1)
        self._states: dict[int, _RowState] = {}

    def draft(self, plan: StepPlan, max_total_tokens: Sequence[int], room: int) -> Int32Array | None:
        """Writes drafts into the table, or PENDING_TOKEN for those that the runner looks up. Returns how many each of
        plan.rows has, or None if there are none.

        max_total_tokens: of each row. room: drafts that fit in the step.
        """
        drafts = [0] * len(plan.rows)
        num_tokens = self._table.num_tokens[plan.rows].tolist()
        decodes = (plan.sample_rows & (plan.num_scheduled_tokens == 1)).tolist()
        num_left = len(drafts)
        for i, row in enumerate(plan.rows.tolist()):
            if room > 0 and decodes[i]:
                limit = min(-(-room // num_left), max_total_tokens[i] - num_tokens[i] - 1)
                drafts[i] = self._draft_row(row, num_tokens[i], limit)
                room -= drafts[i]
            num_left -= 1
        return np.array(drafts, np.int32) if any(drafts) else None

    def learn(self, rows: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """Records the outcome of a step's drafts. Called after table.num_tokens was updated."""
        for row, drafted, accepted in zip(rows.tolist(), num_drafts.tolist(), num_accepted.tolist(), strict=True):
            state = self._states.get(row)
            if drafted and state is not None:
                self._adapt(row, state, drafted, accepted, len(rows))

    def forget(self, row: int) -> None:
        self._states.pop(row, None)

    def _adapt(self, row: int, state: _RowState, drafted: int, accepted: int, num_rows: int) -> None:
        width = max(state.width, 2 * drafted) if accepted == drafted else accepted + 1
        state.width = min(width, self._num_drafts_max)
        state.accepted_share += SAMPLE_WEIGHT * (accepted / drafted - state.accepted_share)
        if state.accepted_share * self._max_step_tokens > num_rows:
            state.pause_tokens = 0
        else:
            state.pause_tokens = min(2 * state.pause_tokens or 1, self._max_pause_steps * num_rows)
            state.resume_at = int(self._table.num_tokens[row]) + state.pause_tokens

    def _draft_row(self, row: int, num_tokens: int, limit: int) -> int:
        """Writes up to `limit` drafts after the row's tokens; returns how many."""
        state = self._states.get(row)
        if state is None:
            indexed_end = max(num_tokens - MAX_INDEXED_TOKENS, 0)
            state = self._states[row] = _RowState({n: {} for n in self._lengths}, indexed_end)
        limit = min(limit, state.width)
        if limit <= 0 or num_tokens < state.resume_at:
            return 0
        tokens = self._table.token_ids[row]
        if not self._looks_up:
            tokens[num_tokens : num_tokens + limit] = PENDING_TOKEN
            return limit
        source = self._find(state, tokens, num_tokens)
        if source < 0:
            return 0
        # Text that repeats at a short distance keeps repeating, so the copy may run into its own output.
        tokens[num_tokens : num_tokens + limit] = np.resize(tokens[source:num_tokens], limit)
        return limit

    def _find(self, state: _RowState, tokens: Int32Array, num_tokens: int) -> int:
        """The position after the last earlier occurrence of the text's longest matching suffix, or -1."""
        start = max(state.indexed_end + 1 - self._lengths[-1], 0)
        text = tokens[start:num_tokens].tolist()
        source, is_found = -1, True
        for n, latest in state.latest.items():
            # If a suffix has not occurred before, no longer one has; the index is updated regardless.
            if len(text) == n + 1 or state.indexed_end + 2 == num_tokens:
                if len(text) > n:
                    latest[tuple(text[-n - 1 : -1])] = num_tokens - 1
            else:
                grams = zip(*(text[offset:-1] for offset in range(n)), strict=False)
                latest.update(zip(grams, range(start + n, num_tokens), strict=False))
            if is_found:
                found = latest.get(tuple(text[-n:]), -1)
                is_found = found >= 0
                source = found if is_found else source
        state.indexed_end = num_tokens - 1
        return source


MAX_FORCED_TOKENS = 32
"""Maximum number of forced tokens per row and step."""


class Drafter:
    """One thread calls it; owns the counters."""

    def __init__(
        self, config: EngineConfig, rows: Rows, kv_cache: KVCacheManager, constraints: Constraints, overlaps: bool
    ) -> None:
        """overlaps: whether steps are launched before the tokens of the last one are read; the runner then looks
        guesses up."""
        speculation, max_tokens = config.speculative_config, config.max_speculative_step_tokens
        self._rows, self._table, self._kv_cache, self._constraints = rows, rows.table, kv_cache, constraints
        self._overlaps = overlaps
        self._max_guess_step_tokens = max_tokens
        self._speculator = Speculator(speculation, rows.table, max_tokens, not overlaps) if speculation else None
        self._max_step_tokens = config.max_num_batched_tokens
        self._max_step_samples = config.max_step_samples
        may_force = not overlaps or config.may_draft
        self._forces = may_force and not config.structured_outputs_config.disable_jump_forward
        self.guesses: Int32Array | None = None
        """Of the latest plan, int32 [rows]: drafts that are guesses; None if there are none."""
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    def with_drafts(self, plan: StepPlan) -> StepPlan:
        """The plan with drafts, as far as there are any and free blocks for them. They are in the table then, or
        PENDING_TOKEN for those that the runner looks up."""
        self.guesses = None
        if self._forces and self._rows.constraints:
            plan = self._with(plan, self._forced(plan))
        if self._speculator is None or len(plan.rows) >= self._max_guess_step_tokens:
            return plan
        guesses = self._guess(plan)
        drafted = self._with(plan, guesses)
        if drafted is not plan and guesses is not None:
            self.guesses = guesses
        return drafted

    def read(self, step: CompletedStep) -> None:
        """Learns from the outcome of a step's guesses."""
        if self._speculator is None or (guesses := step.num_guesses) is None:
            return
        rows = np.array(step.sampled_rows, np.int32)
        num_accepted = np.array([len(token_ids) - 1 for token_ids in step.new_token_ids], np.int32)
        self.num_drafts += int(np.count_nonzero(guesses))
        self.num_draft_tokens += int(guesses.sum())
        self.num_accepted_tokens += int(num_accepted[guesses > 0].sum())
        self._speculator.learn(rows, guesses, num_accepted)

    def forget(self, row: int) -> None:
        if self._speculator is not None:
            self._speculator.forget(row)

    def _with(self, plan: StepPlan, drafts: Int32Array | None) -> StepPlan:
        """The plan with these drafts in addition to its own, which belong to other rows."""
        if drafts is None or not drafts.any():
            return plan
        scheduled = plan.num_scheduled_tokens + drafts
        if not self._kv_cache.reserve(plan.rows, self._table.num_computed_tokens[plan.rows] + scheduled):
            return plan
        if plan.num_draft_tokens is not None:
            drafts = plan.num_draft_tokens + drafts
        return StepPlan(plan.rows, scheduled, plan.sample_rows, drafts)

    def _forced(self, plan: StepPlan) -> Int32Array | None:
        """Writes the tokens that constraints force into the table, after the tokens of decoding rows. Returns how many
        per row."""
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
        """Writes guesses into the table, after the tokens of decoding rows. Returns how many per row."""
        assert self._speculator is not None
        room = self._max_guess_step_tokens - plan.num_tokens
        rows = plan.rows.tolist()
        limits = [self._rows[row].max_total_tokens for row in rows]
        for i, row in enumerate(rows):
            has_drafts = plan.num_draft_tokens is not None and plan.num_draft_tokens[i]
            # What bad words ban depends on the previous token, and it would be known too late whether a grammar allows
            # what the runner looks up.
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
        """The row's constraint after its known tokens; None also if they violate it, which the masks report."""
        constraint = self._rows.constraints.get(row)
        if constraint is None:
            return None
        try:
            self._constraints.known(row, constraint)
        except BadInputError:
            return None
        return constraint
