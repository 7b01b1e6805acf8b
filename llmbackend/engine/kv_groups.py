"""Which layers share a KV block, and how many blocks a request takes at once.

For: runners, which know their layers' windows and make the KV memory; the scheduler, which admits what fits; hosts,
which refuse what never will. Does not know: which block is whose, how attention is computed. Invariant: a request that
generates in a given memory is within `most_tokens`, so that it is admitted again after a preemption or on another
engine, whatever it has generated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Count = TypeVar("Count", int, npt.NDArray[np.int32])
"""One number, or one for each row."""


class KVGroups(msgspec.Struct, frozen=True, array_like=True):
    """A block holds the keys and values of one group of layers for block_size positions of a request.

    num_full      groups whose layers see all positions: a request keeps their blocks
    num_windowed  groups whose layers see a window: blocks that lie wholly behind it are free again
    window        positions that a query of those layers sees, itself included
    """

    num_full: int = 1
    num_windowed: int = 0
    window: int = 0

    @classmethod
    def of(cls, windows: Sequence[int]) -> KVGroups:
        """windows: of each layer; 0: it sees all. All layers are one group, which sees what the widest window shows."""
        return cls() if not windows or 0 in windows else cls(0, 1, max(windows))

    def most_blocks(self, num_tokens: int, chunk_tokens: int, block_size: int) -> int:
        """That a request of so many tokens holds at once, when it is computed in chunks of so many."""
        columns = -(-num_tokens // block_size)
        at_once = self.most_windowed(chunk_tokens, block_size)
        return self.num_full * columns + self.num_windowed * min(columns, at_once)

    def most_windowed(self, chunk_tokens: Count, block_size: int) -> Count:
        """Blocks of a windowed group that a chunk's queries see at most, their own positions included, wherever in a
        block it begins."""
        return (self.window + chunk_tokens + 2 * block_size - 3) // block_size

    def most_chunk(self, num_tokens: int, block_size: int, num_blocks: int) -> int:
        """The largest chunks in which a request of so many tokens can be computed in that many blocks; 0: it cannot."""
        columns = -(-num_tokens // block_size)
        if (self.num_full + self.num_windowed) * columns <= num_blocks:
            return num_tokens
        if not self.num_windowed:
            return 0
        at_once = (num_blocks - self.num_full * columns) // self.num_windowed
        return max((at_once - 1) * block_size + 2 - self.window, 0)

    def most_tokens(self, block_size: int, num_blocks: int, chunk_tokens: int = 1) -> int:
        """The longest request that can be computed in that many blocks, in chunks of so many tokens; sys.maxsize: any
        length."""
        columns = num_blocks // (self.num_full + self.num_windowed)
        at_once = self.most_windowed(chunk_tokens, block_size)
        if self.num_windowed and at_once <= columns:
            if not self.num_full:
                return sys.maxsize
            columns = (num_blocks - self.num_windowed * at_once) // self.num_full
        return columns * block_size
