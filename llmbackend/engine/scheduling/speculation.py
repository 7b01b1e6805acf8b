"""N-gram speculation: drafts of a row's next tokens from its own text, as many as have paid lately.

For: the engine core, which has a step compute drafts behind the known tokens, and accepts those that the model samples,
too. Does not know: logits, KV blocks, requests. Invariant: drafts change how many tokens a step gives, never which; the
state here may be lost or wrong at any time, so recovery and preemption need none of it. Only rows that decode in a
small step cost time.

A draft is what followed the last occurrence of the row's last n tokens, for the largest n that has occurred before. A
row whose drafts are accepted gets more of them, up to num_speculative_tokens. A draft costs at most about 1 /
max_step_tokens of a step, and an accepted one saves one row's share of a step; so a row drafts freely while more than
rows / max_step_tokens of its drafts are accepted, and else tries again after pauses that double.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config import SpeculativeConfig
from ..step import NO_TOKEN, PENDING_TOKEN, Int32Array, RowTable, StepPlan

MAX_INDEXED_TOKENS = 8192
"""A row that begins to draft searches its last tokens up to this many, which bounds its index (~5 MB)."""
MAX_PAUSE_STEPS = 32
"""Rows whose drafts do not pay try again seldom: together once in this many steps."""
MAX_LOOKUP_PAUSE_STEPS = 2
"""The same where the runner looks drafts up: it is not known whether a text repeats before a draft is tried, and most
tries fail because it does not yet."""
FIRST_ACCEPTED_SHARE, NEWS_WEIGHT = 0.5, 0.25
"""The assumed accepted share of a new row's drafts, and the weight of each try in the running mean."""


@dataclass(slots=True)
class _RowState:
    """One row's index, and the outcome of its drafts.

    latest          by n, each n-gram of the text that is followed by a token: the position of that token, the last time
    indexed_end     n-grams that end at this position or before are in the index
    width           drafts of the next try
    accepted_share  running mean of the accepted share of its drafts, 0 to 1
    pause_tokens    tokens that the row waited after its last try; 0 while drafts pay
    resume_at       tokens from which on it drafts again
    """

    latest: dict[int, dict[tuple[int, ...], int]]
    indexed_end: int
    width: int = 1
    accepted_share: float = FIRST_ACCEPTED_SHARE
    pause_tokens: int = 0
    resume_at: int = 0


class Speculator:
    """Owner of the drafting rows' states. One thread calls it."""

    def __init__(self, config: SpeculativeConfig, table: RowTable, max_step_tokens: int, looks_up: bool = True) -> None:
        """max_step_tokens: of the largest step with drafts, these included. looks_up: False where the runner looks
        drafts up, and this says only how many: a try that finds nothing costs as much as one that fails there."""
        self._table = table
        self._looks_up = looks_up
        self._max_pause_steps = MAX_PAUSE_STEPS if looks_up else MAX_LOOKUP_PAUSE_STEPS
        self._num_drafts_max = config.num_speculative_tokens
        self._max_step_tokens = max_step_tokens
        self._lengths = range(config.lookup_min, config.lookup_max + 1)
        self._states: dict[int, _RowState] = {}

    def draft(self, plan: StepPlan, max_total_tokens: Sequence[int], room: int) -> Int32Array | None:
        """Writes drafts into the table, or PENDING_TOKEN in place of those that the runner looks up, and returns how
        many each of plan.rows has, or None when there are none.

        max_total_tokens: of each row. room: drafts that the step has room for.
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
        """Records the outcome of a step's drafts. Called after table.num_tokens has moved on."""
        for row, drafted, accepted in zip(rows.tolist(), num_drafts.tolist(), num_accepted.tolist(), strict=True):
            state = self._states.get(row)
            if drafted and state is not None:
                self._adapt(row, state, drafted, accepted, len(rows))

    def forget(self, row: int) -> None:
        """The row's request is over."""
        self._states.pop(row, None)

    def _adapt(self, row: int, state: _RowState, drafted: int, accepted: int, num_rows: int) -> None:
        width = max(state.width, 2 * drafted) if accepted == drafted else accepted + 1
        state.width = min(width, self._num_drafts_max)
        state.accepted_share += NEWS_WEIGHT * (accepted / drafted - state.accepted_share)
        if state.accepted_share * self._max_step_tokens > num_rows:
            state.pause_tokens = 0
        else:
            state.pause_tokens = min(2 * state.pause_tokens or 1, self._max_pause_steps * num_rows)
            state.resume_at = int(self._table.num_tokens[row]) + state.pause_tokens

    def _draft_row(self, row: int, num_tokens: int, limit: int) -> int:
        """Writes up to `limit` drafts behind the row's tokens; returns how many."""
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
        # Text that repeats at a short distance goes on repeating: the copy may reach into what it has copied.
        tokens[num_tokens : num_tokens + limit] = np.resize(tokens[source:num_tokens], limit)
        return limit

    def _find(self, state: _RowState, tokens: Int32Array, num_tokens: int) -> int:
        """The position that followed the last earlier occurrence of the text's longest ending, or -1."""
        start = max(state.indexed_end + 1 - self._lengths[-1], 0)
        text = tokens[start:num_tokens].tolist()
        source, is_found = -1, True
        for n, latest in state.latest.items():
            # If an ending has not occurred before, no longer one has; the index is updated all the same.
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


def accepted_runs(plan: StepPlan, token_ids: Int32Array, table: RowTable) -> tuple[Int32Array, Int32Array]:
    """Where in the sampled `token_ids` each sampled row's new tokens start, and how many they are. int32 [rows] both.

    A row's sampled tokens count up to and including the first that differs from its draft: those behind it followed a
    wrong draft. Called before table.num_tokens moves on.
    """
    num_rows = int(np.count_nonzero(plan.sample_rows))
    if plan.num_draft_tokens is None:
        return np.arange(num_rows, dtype=np.int32), np.ones(num_rows, np.int32)
    counts = plan.num_draft_tokens[plan.sample_rows] + 1
    ends = np.cumsum(counts, dtype=np.int32)
    rows, positions = plan.samples(table)
    is_last = np.zeros(len(token_ids), np.bool_)
    is_last[ends - 1] = True
    drafts = table.token_ids[rows, np.minimum(positions, table.max_model_len - 1)]
    differs = (is_last | (token_ids != drafts)).nonzero()[0]
    starts = ends - counts
    lasts = differs[np.searchsorted(differs, starts)].astype(np.int32)
    # Broken logits behind accepted drafts: the run ends before them, and the next step begins with them.
    lasts -= (token_ids[lasts] == NO_TOKEN) & (lasts > starts)
    return starts, lasts - starts + 1
