"""N-gram speculation: guesses of a row's next tokens from its own text, and as many of them as have paid lately.

For: the engine core, which has a step compute guesses (drafts) beside the tokens that are known, and keeps those that
the model samples as well. Does not know: logits, KV blocks, requests. Invariant: drafts change how many tokens a step
gives, never which; all that is remembered here may be lost or wrong at any time, so recovery and preemption need
nothing of it. Only rows that decode in a small step cost anything.

A draft is what followed the last time that the row's last n tokens came, for the largest n that has come before. A row
whose drafts hold gets more of them, up to num_speculative_tokens; one whose drafts were all wrong gets one at a time,
after pauses that double.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .config import SpeculativeConfig
from .step import NO_TOKEN, Int32Array, RowTable, StepPlan

MAX_INDEXED_TOKENS = 8192
"""Of a longer text only this many last tokens are searched when a row begins to draft; bounds its index (~5 MB)."""
MAX_PAUSE_TOKENS = 64
"""With one wrong draft per so many tokens, text that does not repeat costs no more than one step in 64 a bit."""


@dataclass(slots=True)
class _RowState:
    """One row's index and what its drafts came to.

    latest: by n, each n-gram of the text and the position after its last occurrence, for those with a token there.
    indexed_end: n-grams that end before this position are in it. width: how many drafts the next try has. pause_tokens:
    how many tokens the row waits after a try that fails; resume_at: it drafts no sooner than with so many tokens.
    """

    latest: dict[int, dict[tuple[int, ...], int]]
    indexed_end: int
    width: int = 1
    pause_tokens: int = 1
    resume_at: int = field(default=0)


class Speculator:
    """Owner of the drafting rows' states. One thread calls it."""

    def __init__(self, config: SpeculativeConfig, table: RowTable) -> None:
        self._table = table
        self._num_drafts_max = config.num_speculative_tokens
        self._lengths = range(config.lookup_min, config.lookup_max + 1)
        self.max_step_tokens = config.max_step_tokens
        self._states: dict[int, _RowState] = {}

    def draft(self, plan: StepPlan, max_new_tokens: Int32Array, max_step_tokens: int) -> Int32Array | None:
        """Writes drafts into the table and returns how many each of plan.rows has, or None when there are none.

        max_new_tokens int32 [n]: how many tokens each row may still give. The step stays within `max_step_tokens`.
        """
        room = min(self.max_step_tokens, max_step_tokens) - plan.num_tokens
        if room <= 0:
            return None
        drafts = np.zeros_like(plan.rows)
        decoding = (plan.sample_rows & (plan.num_scheduled_tokens == 1)).nonzero()[0].tolist()
        for num_before, i in enumerate(decoding):
            share = -(-room // (len(decoding) - num_before))
            drafts[i] = self._draft_row(int(plan.rows[i]), min(share, int(max_new_tokens[i]) - 1))
            room -= int(drafts[i])
        return drafts if drafts.any() else None

    def learn(self, rows: Int32Array, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """What came of the drafts of a step's sampled rows. Called when table.num_tokens has been moved on."""
        for row, drafted, accepted in zip(rows.tolist(), num_drafts.tolist(), num_accepted.tolist(), strict=True):
            state = self._states.get(row)
            if drafted and state is not None:
                self._adapt(row, state, drafted, accepted)

    def forget(self, row: int) -> None:
        """The row's request is over."""
        self._states.pop(row, None)

    def _adapt(self, row: int, state: _RowState, drafted: int, accepted: int) -> None:
        if accepted == drafted:
            state.width = min(max(state.width, 2 * drafted), self._num_drafts_max)
        else:
            state.width = max(accepted, 1)
        if accepted:
            state.pause_tokens = max(state.pause_tokens // 4, 1)
        else:
            state.pause_tokens = min(2 * state.pause_tokens, MAX_PAUSE_TOKENS)
            state.resume_at = int(self._table.num_tokens[row]) + state.pause_tokens

    def _draft_row(self, row: int, limit: int) -> int:
        """Writes up to `limit` drafts behind the row's tokens; returns how many."""
        num_tokens = int(self._table.num_tokens[row])
        state = self._states.get(row)
        if state is None:
            indexed_end = max(num_tokens - MAX_INDEXED_TOKENS, 0)
            state = self._states[row] = _RowState({n: {} for n in self._lengths}, indexed_end)
        limit = min(limit, state.width)
        if limit <= 0 or num_tokens < state.resume_at:
            return 0
        tokens = self._table.token_ids[row]
        source = self._find(state, tokens, num_tokens)
        if source < 0:
            return 0
        # What repeats itself at a short distance goes on repeating: the copy may reach into what it has copied.
        tokens[num_tokens : num_tokens + limit] = np.resize(tokens[source:num_tokens], limit)
        return limit

    def _find(self, state: _RowState, tokens: Int32Array, num_tokens: int) -> int:
        """Where the text went on after the last earlier occurrence of its longest ending, or -1."""
        longest = self._lengths[-1]
        if state.indexed_end + 1 == num_tokens - 1:
            start = max(num_tokens - 1 - longest, 0)
            ending = tokens[start:num_tokens].tolist()
            for n, latest in state.latest.items():
                if n < len(ending):
                    latest[tuple(ending[-n - 1 : -1])] = num_tokens - 1
            state.indexed_end = num_tokens - 1
        else:
            self._index(state, tokens, num_tokens - 1)
            ending = tokens[max(num_tokens - longest, 0) : num_tokens].tolist()
        source = -1
        for n, latest in state.latest.items():
            found = latest.get(tuple(ending[-n:]), -1)
            if found < 0:
                break  # nor has any longer ending come before
            source = found
        return source

    def _index(self, state: _RowState, tokens: Int32Array, end: int) -> None:
        """Takes in all n-grams that end at `end` or before, and have not been taken in."""
        start = max(state.indexed_end + 1 - self._lengths[-1], 0)
        text = tokens[start:end].tolist()
        for n, latest in state.latest.items():
            grams = zip(*(text[offset:] for offset in range(n)), strict=False)
            latest.update(zip(grams, range(start + n, end + 1), strict=False))
        state.indexed_end = end


def runs_that_hold(plan: StepPlan, token_ids: Int32Array, table: RowTable) -> tuple[Int32Array, Int32Array]:
    """Where in the sampled `token_ids` each sampled row's new tokens start, and how many they are. int32 [rows] both.

    A row's sampled tokens hold up to and with the first that differs from the draft in its place: those behind it
    followed a wrong draft. Called before table.num_tokens moves on.
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
    # Broken logits behind drafts that hold: the run ends before them, and the next step begins with them.
    lasts -= (token_ids[lasts] == NO_TOKEN) & (lasts > starts)
    return starts, lasts - starts + 1
