"""The blocks of windowed layer groups, attached to the blocks of the full-attention group.

Used by the manager of KV blocks if only some layers have a window. A block of the full-attention group is held as long
as its row. Its part, one block of each windowed group for the same positions, is needed only while a query of some row
may attend to them. Invariants: a block has its whole part or has lost it; a row's tables of the windowed groups contain
the parts that it needs, preceded by FREED_BLOCK.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..step import BoolArray, Int32Array

FREED_BLOCK: Final = -1
"""In a row's table, replaces a block outside the window; no step reads it."""
_LOST: Final = -1


class WindowParts:
    def __init__(self, tables: Int32Array, num_blocks: int) -> None:
        """tables: those of the windowed groups in the row table, int32 [groups, rows, columns]"""
        self.num_groups = len(tables)
        self._tables = tables
        self._parts: Int32Array = np.full((num_blocks, self.num_groups), _LOST, np.int32)
        self.holders: Int32Array = np.zeros(num_blocks, np.int32)
        """By block: how many rows need its part."""

    def has(self, block: int) -> bool:
        """Whether the block has its part."""
        return bool(self._parts[block, 0] != _LOST)

    def present(self, blocks: Int32Array) -> BoolArray:
        """Which of these blocks have their parts."""
        present: BoolArray = self._parts[blocks, 0] != _LOST
        return present

    def attach(self, row: int, first: int, blocks: Int32Array, parts: Int32Array) -> None:
        """Attaches parts, int32 [blocks, groups], to a row's new blocks, from the column `first` on; the row needs
        them."""
        self._parts[blocks] = parts
        self._hold(row, first, blocks)

    def take(self, row: int, first: int, blocks: Int32Array) -> None:
        """A row starts with found blocks; those from the column `first` on have parts, which it needs."""
        self._tables[:, row, :first] = FREED_BLOCK
        self._hold(row, first, blocks)

    def leave(self, row: int, first: int, blocks: Int32Array) -> Int32Array:
        """A row no longer needs the parts of its blocks from the column `first` on. Returns the blocks whose parts no
        row needs."""
        self._tables[:, row, first : first + len(blocks)] = FREED_BLOCK
        self.holders[blocks] -= 1
        unused: Int32Array = blocks[self.holders[blocks] == 0]
        return unused

    def detach(self, blocks: Int32Array) -> Int32Array:
        """Detaches and returns the parts of these blocks."""
        parts = self._parts[blocks].reshape(-1)
        self._parts[blocks] = _LOST
        return parts

    def all(self) -> tuple[Int32Array, Int32Array]:
        """The blocks with parts, int32 [n], and the parts, int32 [n, groups]."""
        blocks = (self._parts[:, 0] != _LOST).nonzero()[0].astype(np.int32)
        return blocks, self._parts[blocks]

    def check(self, needed: list[tuple[int, int, Int32Array]]) -> None:
        """needed: for each row, the first column at which it needs parts, and its blocks there. Raises AssertionError
        if tables or counts disagree."""
        holders = np.zeros_like(self.holders)
        for row, first, blocks in needed:
            holders[blocks] += 1
            if (self._tables[:, row, first : first + len(blocks)] != self._parts[blocks].T).any():
                raise AssertionError(f"row {row} holds other blocks than the parts of its blocks")
            if (self._tables[:, row, :first] != FREED_BLOCK).any():
                raise AssertionError(f"row {row} holds blocks behind the window")
        if (holders != self.holders).any():
            raise AssertionError("parts are lost or held twice: the counts of their holders are wrong")
        if ((self._parts == _LOST).any(axis=1) != (self._parts == _LOST).all(axis=1)).any():
            raise AssertionError("a block has only some of its part")

    def _hold(self, row: int, first: int, blocks: Int32Array) -> None:
        self.holders[blocks] += 1
        self._tables[:, row, first : first + len(blocks)] = self._parts[blocks].T
