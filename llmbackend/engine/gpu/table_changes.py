"""What has changed in the block table since its reader was last told.

For: messages to a device and to other ranks, which keep a table of their own. Does not know: how they travel, what a
step computes. Invariant: once a reader has applied all changes that were told, its table holds for the plan's rows what
a step may read; what was not told is found again the next time.
"""

from __future__ import annotations

import numpy as np

from ..step import Int32Array, RowTable, StepPlan

NO_CHANGES: Int32Array = np.empty((3, 0), np.int32)


class BlockTableMirror:
    """What the reader's block table holds; zeros at first, like the table itself."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self._known: Int32Array = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)

    def changes(self, plan: StepPlan, table: RowTable) -> Int32Array:
        """Rows, columns and block ids that the reader lacks, int32 [3, n].

        Compared up to the last block of the longest row: what lies behind a shorter row's last block is stale, and
        harmless.
        """
        reach = int((table.num_computed_tokens[plan.rows] + plan.num_scheduled_tokens).max())
        width = -(-reach // table.block_size)
        wanted = table.block_table[plan.rows, :width]  # np.take would copy the whole slice first
        differ = wanted != self._known[plan.rows, :width]
        if not differ.any():
            return NO_CHANGES
        places, columns = np.nonzero(differ)
        return np.stack((plan.rows[places], columns.astype(np.int32), wanted[places, columns]))

    def told(self, changes: Int32Array) -> None:
        """The reader has these changes before all later ones."""
        rows, columns, blocks = changes
        self._known[rows, columns] = blocks
