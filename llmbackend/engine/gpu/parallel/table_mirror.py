"""What followers must know of the row table and of a step: the difference to what they were told before.

For: rank 0's runner, which tells, and followers, which keep a table of their own. Does not know: how it is sent, what a
step computes. Invariants: after `apply`, a mirror holds for the plan's rows what `Runner.execute` may read of the
table; a message costs array operations and bytes in proportion to what is new, for a decode step some tens of bytes for
each row.
Layout of a message: sections of a word for each row, and then the new tokens and the new blocks. Sections: rows ·
num_scheduled_tokens · sample_rows · num_tokens · num_prompt_tokens · num_computed_tokens · where the row's new tokens
begin · how many they are · num_draft_tokens, if there are any. Blocks: rows · columns · ids.
"""

from __future__ import annotations

import numpy as np

from ...step import PENDING_TOKEN, Int32Array, RowTable, StepPlan
from .messages import Step


class TableSender:
    """What all followers know of rank 0's table."""

    def __init__(self, max_num_seqs: int) -> None:
        self._known_tokens: Int32Array = np.zeros(max_num_seqs, np.int32)
        self._known_blocks: Int32Array = np.full((max_num_seqs, 0), -1, np.int32)

    def forget(self, row: int) -> None:
        """Another request has the row."""
        self._known_tokens[row] = 0

    def step(self, step_id: int, plan: StepPlan, table: RowTable) -> Step:
        rows, drafts = plan.rows, plan.num_draft_tokens
        starts, counts, token_ids = self._new_tokens(plan, table)
        sections = (
            rows,
            plan.num_scheduled_tokens,
            plan.sample_rows,
            table.num_tokens[rows],
            table.num_prompt_tokens[rows],
            table.num_computed_tokens[rows],
            starts,
            counts,
            *([] if drafts is None else [drafts]),
        )
        words = np.concatenate((*sections, token_ids, *self._new_blocks(plan, table)), dtype=np.int32)
        return Step(step_id, len(rows), len(token_ids), drafts is not None, words.tobytes())

    def _new_tokens(self, plan: StepPlan, table: RowTable) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Tokens that nobody has read yet are told again, and so are drafts."""
        rows, num_tokens = plan.rows, table.num_tokens[plan.rows]
        starts = np.minimum(self._known_tokens[rows], num_tokens)
        ends = num_tokens if plan.num_draft_tokens is None else num_tokens + plan.num_draft_tokens
        counts = (ends - starts).astype(np.int32)
        owners, columns = _ragged(starts, counts)
        token_ids = table.token_ids[rows[owners], columns]
        pending = np.bincount(owners[token_ids == PENDING_TOKEN], minlength=len(rows))
        self._known_tokens[rows] = num_tokens - pending
        return starts, counts, token_ids

    def _new_blocks(self, plan: StepPlan, table: RowTable) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Up to the last block of the longest row: what lies behind a shorter row's is stale, and harmless."""
        rows = plan.rows
        reach = int((table.num_computed_tokens[rows] + plan.num_scheduled_tokens).max())
        width = -(-reach // table.block_size)
        if width > self._known_blocks.shape[1]:
            known = np.full((len(self._known_blocks), table.block_table.shape[1]), -1, np.int32)
            known[:, : self._known_blocks.shape[1]] = self._known_blocks
            self._known_blocks = known
        current = table.block_table[rows, :width]
        places = np.flatnonzero(current != self._known_blocks[rows, :width])
        indices, columns = np.divmod(places, width)
        new_rows, new_columns, blocks = rows[indices], columns.astype(np.int32), current.reshape(-1)[places]
        self._known_blocks[new_rows, new_columns] = blocks
        return new_rows, new_columns, blocks


def apply(step: Step, table: RowTable) -> StepPlan:
    """Brings a follower's table up to date. Returns the plan."""
    words, num_sections = np.frombuffer(step.words, np.int32), 9 if step.has_drafts else 8
    split = num_sections * step.num_rows
    sections = words[:split].reshape(num_sections, -1)
    token_ids, blocks = words[split : split + step.num_tokens], words[split + step.num_tokens :].reshape(3, -1)
    rows, scheduled, samples, num_tokens, num_prompt_tokens, num_computed_tokens, starts, counts = sections[:8]
    table.num_tokens[rows] = num_tokens
    table.num_prompt_tokens[rows] = num_prompt_tokens
    table.num_computed_tokens[rows] = num_computed_tokens
    owners, columns = _ragged(starts, counts)
    table.token_ids[rows[owners], columns] = token_ids
    table.block_table[blocks[0], blocks[1]] = blocks[2]
    return StepPlan(rows, scheduled, samples != 0, sections[8] if step.has_drafts else None)


def _ragged(starts: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """For runs of numbers side by side: whose run each is in, and the number."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    return owners, np.arange(len(owners), dtype=np.int32) - firsts[owners] + starts[owners]
