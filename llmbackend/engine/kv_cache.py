"""The pool of KV blocks and which row holds which of them.

For: the scheduler, which reserves blocks for the tokens of a step and releases a row's blocks at its end. Does not
know: the KV memory itself (the runner's), requests, or why a block is needed. Invariant: every block is either on the
free stack or in exactly one row's block table; `check()` verifies it. Allocating and freeing cost O(1) per block.
"""

from __future__ import annotations

import numpy as np

from .step import Int32Array, RowTable


class KVCacheManager:
    """Owner of the free stack, and the one writer of `table.block_table`."""

    def __init__(self, num_blocks: int, table: RowTable) -> None:
        self.num_blocks = num_blocks
        self.block_size = table.block_size
        self._block_table = table.block_table
        self._held: Int32Array = np.zeros(table.max_num_seqs, np.int32)
        self._free: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def missing_blocks(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """How many more blocks each row needs to hold `num_tokens[i]` tokens. int32 [n], ≥ 0."""
        missing: Int32Array = np.maximum(-(-num_tokens // self.block_size) - self._held[rows], 0)
        return missing

    def reserve(self, rows: Int32Array, num_tokens: Int32Array) -> bool:
        """Gives each row the blocks to hold `num_tokens[i]` tokens: all of them and True, or none and False."""
        missing = self.missing_blocks(rows, num_tokens)
        if missing.sum() > self._num_free:
            return False
        for i in missing.nonzero()[0].tolist():
            self._take(int(rows[i]), int(missing[i]))
        return True

    def release(self, row: int) -> None:
        """Returns all blocks of a row. Its block table goes stale."""
        held = int(self._held[row])
        top = self._num_free
        self._free[top : top + held] = self._block_table[row, :held][::-1]
        self._num_free = top + held
        self._held[row] = 0

    def check(self) -> None:
        """Raises AssertionError unless free and held blocks together are each block exactly once."""
        tables = [self._block_table[row, :held] for row, held in enumerate(self._held.tolist())]
        blocks = np.concatenate([self._free[: self._num_free], *tables])
        if len(blocks) != self.num_blocks or not (np.bincount(blocks, minlength=self.num_blocks) == 1).all():
            raise AssertionError(f"KV blocks are lost or held twice: {len(blocks)} known of {self.num_blocks}")

    def _take(self, row: int, count: int) -> None:
        held, top = int(self._held[row]), self._num_free
        self._block_table[row, held : held + count] = self._free[top - count : top][::-1]
        self._num_free = top - count
        self._held[row] = held + count
