"""A step's rows as one flat batch of tokens, in arrays of int32.

For: whatever computes a step. Does not know: models or memory. Invariant: built by array operations alone, so that a
step's cost in Python does not grow with its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .step import Int32Array, RowTable, StepPlan


@dataclass(frozen=True, slots=True)
class FlatStep:
    """rows, query_lens, seq_lens [n]; query_start [n + 1]; token_ids, positions, slots [tokens]; sampled_tokens: where
    in the batch the tokens are that samples follow, in the order of `plan.samples`. All int32."""

    rows: Int32Array
    query_lens: Int32Array
    seq_lens: Int32Array
    query_start: Int32Array
    token_ids: Int32Array
    positions: Int32Array
    slots: Int32Array
    sampled_tokens: Int32Array

    def blocks_in_use(self, table: RowTable) -> Int32Array:
        """The block tables of the step's rows, as wide as the longest of them needs; int32 [rows, blocks]."""
        width = -(-int(self.seq_lens.max()) // table.block_size)
        blocks: Int32Array = np.take(table.block_table[:, :width], self.rows, axis=0)
        return blocks


def flatten(plan: StepPlan, table: RowTable, order: Int32Array | None = None) -> FlatStep:
    """The plan's rows in the given order (default: their own), and their tokens one after the other."""
    rows, counts = plan.rows, plan.num_scheduled_tokens
    if order is not None:
        rows, counts = rows[order], counts[order]
    lens = table.num_computed_tokens[rows] + counts
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    ends = starts[1:]
    token_rows = np.repeat(rows, counts)
    positions = np.arange(ends[-1], dtype=np.int32) - np.repeat(ends - lens, counts)
    last_tokens = ends - 1
    if order is not None:
        last_tokens = np.empty_like(ends)
        last_tokens[order] = ends - 1
    blocks = table.block_table[token_rows, positions // table.block_size]
    return FlatStep(
        rows=rows,
        query_lens=counts,
        seq_lens=lens,
        query_start=starts,
        token_ids=table.token_ids[token_rows, positions],
        positions=positions,
        slots=blocks * np.int32(table.block_size) + positions % table.block_size,
        sampled_tokens=_with_drafts(plan, last_tokens[plan.sample_rows]),
    )


def _with_drafts(plan: StepPlan, last_tokens: Int32Array) -> Int32Array:
    """From where each sampled row's chunk ends to where its known tokens end and to all of its drafts."""
    if plan.num_draft_tokens is None:
        return last_tokens
    counts = plan.num_draft_tokens[plan.sample_rows] + 1
    ends = np.cumsum(counts, dtype=np.int32)
    return np.arange(ends[-1], dtype=np.int32) + np.repeat(last_tokens + 1 - ends, counts)
