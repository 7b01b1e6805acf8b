"""What a device must be told about the rows of a step: sequences, drafts, and changes of the block tables.

Used for the message of a step, and for other ranks, which have their own tables. Invariants: the tokens of the
sequences are the plan's, in its order. A draft is a sequence of one query that shares the blocks of its row: every
layer writes the keys of the step before it attends, so a draft attends to the drafts before it, and the kernels and
graphs are those of a decode step. Each message repeats everything the host knows about rows with drafts, so a failed
step can be repeated. A reader that has applied all changes knows every block that the step reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config import EngineConfig
from ..step import PENDING_TOKEN, BoolArray, Int32Array, RowTable, StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepSequences:
    """Arrays over the sequences of a step.

    rows        int32 [n]  a row with drafts occurs several times in succession
    query_lens  int32 [n]  tokens that the step computes
    seq_lens    int32 [n]  tokens that have KV after the step; also the position of the sampled token
    samples     bool  [n]
    """

    rows: Int32Array
    query_lens: Int32Array
    seq_lens: Int32Array
    samples: BoolArray

    @classmethod
    def of(cls, plan: StepPlan, table: RowTable) -> StepSequences:
        rows, query_lens, drafts = plan.rows, plan.num_scheduled_tokens, plan.num_draft_tokens
        seq_lens = table.num_computed_tokens[rows] + query_lens
        if drafts is None:
            return cls(rows, query_lens, seq_lens, plan.sample_rows)
        ends = np.cumsum(drafts + 1, dtype=np.int32)
        starts = ends - drafts - 1
        index = np.repeat(np.arange(len(rows)), drafts + 1)
        expanded_lens = np.ones(len(index), np.int32)
        expanded_lens[starts] = query_lens - drafts
        places: Int32Array = np.arange(len(index), dtype=np.int32) - starts[index]
        return cls(rows[index], expanded_lens, (seq_lens - drafts)[index] + places, plan.sample_rows[index])


def num_sequences(plan: StepPlan) -> int:
    return len(plan.rows) + (0 if plan.num_draft_tokens is None else int(plan.num_draft_tokens.sum()))


def max_sequences(config: EngineConfig) -> int:
    """Maximum number of sequences in a step; also the maximum number of samples."""
    return max(config.max_num_seqs, config.max_step_samples) if config.may_draft else config.max_num_seqs


NUM_FIELDS = 7
"""Of `drafted_rows`."""
_NONE: Int32Array = np.empty((NUM_FIELDS, 0), np.int32)


def drafted_rows(plan: StepPlan, table: RowTable) -> Int32Array:
    """int32 [NUM_FIELDS, n], for each row:

    row
    num_tokens       before the step, if all drafts of earlier steps are accepted
    pending_drafts   how many of these may be rejected; 0 = num_tokens is exact
    first_sequence   its first sequence in the step; those of its drafts follow
    first_sample     its first sample in the step
    num_drafts
    num_lookups      how many drafts the device looks up: all or none
    """
    rows, drafts, pending = plan.rows, plan.num_draft_tokens, table.num_pending_drafts[plan.rows]
    if drafts is None:
        if not pending.any():
            return _NONE
        drafts = np.zeros_like(rows)
    sequences = drafts + 1
    samples = np.where(plan.sample_rows, sequences, 0)
    num_tokens = table.num_tokens[rows]
    first_drafts = table.token_ids[rows, np.minimum(num_tokens, table.max_model_len - 1)]
    fields = (
        rows,
        num_tokens,
        pending,
        np.cumsum(sequences) - sequences,
        np.cumsum(samples) - samples,
        drafts,
        np.where(first_drafts == PENDING_TOKEN, drafts, 0),
    )
    found: Int32Array = np.stack(fields).astype(np.int32)[:, (drafts > 0) | (pending > 0)]
    return found


NO_CHANGES: Int32Array = np.empty((3, 0), np.int32)


class BlockTableMirror:
    """The content of the reader's block tables, initially zeros. Row r of layer group g has the number g * max_num_seqs
    + r."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, num_groups: int = 1) -> None:
        self._known: Int32Array = np.zeros((num_groups, max_num_seqs, max_blocks_per_seq), np.int32)

    def changes(self, plan: StepPlan, table: RowTable) -> Int32Array:
        """Row numbers, columns and block ids that the reader does not have yet, int32 [3, n].

        Compared up to the last block of the longest row: stale entries after the last block of a shorter row are
        harmless.
        """
        reach = int((table.num_computed_tokens[plan.rows] + plan.num_scheduled_tokens).max())
        width = -(-reach // table.block_size)
        wanted = table.block_tables[:, plan.rows, :width]  # np.take would copy the whole slice first
        differ = wanted != self._known[:, plan.rows, :width]
        if not differ.any():
            return NO_CHANGES
        groups, places, columns = np.nonzero(differ)
        numbers = groups.astype(np.int32) * self._known.shape[1] + plan.rows[places]
        return np.stack((numbers, columns.astype(np.int32), wanted[groups, places, columns]))

    def mark_sent(self, changes: Int32Array) -> None:
        """The reader applies these changes before all later ones."""
        numbers, columns, blocks = changes
        self._known.reshape(-1, self._known.shape[2])[numbers, columns] = blocks
