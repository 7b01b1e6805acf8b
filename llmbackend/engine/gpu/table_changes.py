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
    """What the reader's block tables hold; zeros at first, like the tables themselves. Row r of a group g of layers has
    the number g * max_num_seqs + r."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, num_groups: int = 1) -> None:
        self._known: Int32Array = np.zeros((num_groups, max_num_seqs, max_blocks_per_seq), np.int32)

    def changes(self, plan: StepPlan, table: RowTable) -> Int32Array:
        """Row numbers, columns and block ids that the reader lacks, int32 [3, n].

        Compared up to the last block of the longest row: what lies behind a shorter row's last block is stale, and
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

    def told(self, changes: Int32Array) -> None:
        """The reader has these changes before all later ones."""
        numbers, columns, blocks = changes
        self._known.reshape(-1, self._known.shape[2])[numbers, columns] = blocks
