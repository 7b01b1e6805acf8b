"""What followers must know of the row table and of a step: the difference to what they were told before.

For: rank 0's runner, which tells, and followers, which keep a table of their own. Does not know: how it is sent, what a
step computes. Invariants: after `apply`, a mirror holds for the plan's rows what `Runner.execute` may read of the
table; a message costs array operations and bytes in proportion to what is new, for a decode step some tens of bytes for
each row.
"""

from __future__ import annotations

import numpy as np

from ...step import PENDING_TOKEN, BoolArray, Int32Array, RowTable, StepPlan
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
        arrays = [rows, plan.num_scheduled_tokens, plan.sample_rows.astype(np.int32)]
        starts, counts, token_ids = self._new_tokens(plan, table)
        return Step(
            step_id=step_id,
            plan=_bytes(*arrays, *([] if drafts is None else [drafts])),
            counts=_bytes(table.num_tokens[rows], table.num_prompt_tokens[rows], table.num_computed_tokens[rows]),
            new_starts=_bytes(starts),
            new_counts=_bytes(counts),
            new_token_ids=_bytes(token_ids),
            new_blocks=_bytes(*self._new_blocks(plan, table)),
            has_drafts=drafts is not None,
        )

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
        rows = plan.rows
        num_positions = table.num_computed_tokens[rows] + plan.num_scheduled_tokens
        used = -(-num_positions // table.block_size)
        width = int(used.max())
        if width > self._known_blocks.shape[1]:
            known = np.full((len(self._known_blocks), table.block_table.shape[1]), -1, np.int32)
            known[:, : self._known_blocks.shape[1]] = self._known_blocks
            self._known_blocks = known
        current = table.block_table[rows, :width]
        is_new = (current != self._known_blocks[rows, :width]) & (np.arange(width) < used[:, None])
        indices, columns = np.nonzero(is_new)
        blocks = current[indices, columns]
        self._known_blocks[rows[indices], columns] = blocks
        return rows[indices], columns.astype(np.int32), blocks


def apply(step: Step, table: RowTable) -> StepPlan:
    """Brings a follower's table up to date. Returns the plan."""
    parts = _arrays(step.plan, 4 if step.has_drafts else 3)
    rows = parts[0]
    sample_rows: BoolArray = parts[2] != 0
    plan = StepPlan(rows, parts[1], sample_rows, parts[3] if step.has_drafts else None)
    table.num_tokens[rows], table.num_prompt_tokens[rows], table.num_computed_tokens[rows] = _arrays(step.counts, 3)
    [starts], [counts] = _arrays(step.new_starts, 1), _arrays(step.new_counts, 1)
    owners, columns = _ragged(starts, counts)
    table.token_ids[rows[owners], columns] = _arrays(step.new_token_ids, 1)[0]
    block_rows, block_columns, blocks = _arrays(step.new_blocks, 3)
    table.block_table[block_rows, block_columns] = blocks
    return plan


def _ragged(starts: Int32Array, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
    """For runs of numbers side by side: whose run each is in, and the number."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    firsts = np.cumsum(counts, dtype=np.int32) - counts
    return owners, np.arange(len(owners), dtype=np.int32) - firsts[owners] + starts[owners]


def _bytes(*arrays: Int32Array) -> bytes:
    return b"".join(array.astype(np.int32, copy=False).tobytes() for array in arrays)


def _arrays(data: bytes, count: int) -> list[Int32Array]:
    return list(np.frombuffer(data, np.int32).reshape(count, -1))
