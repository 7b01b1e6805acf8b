"""Which layers share a KV block, and how many blocks a request takes at once.

For: runners, which know their layers' windows and make the KV memory; the scheduler, which admits what fits; hosts,
which refuse what never will. Does not know: which block is whose, how attention is computed. Invariant: a request that
runs in a given memory never exceeds `most_tokens`, so that it is admitted again after a preemption or on another
engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
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

    @property
    def count(self) -> int:
        return self.num_full + self.num_windowed

    def most_blocks(self, num_tokens: int, chunk_tokens: int, block_size: int) -> int:
        """Most blocks that a request of `num_tokens` holds at once, when it is computed in chunks of `chunk_tokens`."""
        columns = -(-num_tokens // block_size)
        at_once = self.most_windowed(chunk_tokens, block_size)
        return self.num_full * columns + self.num_windowed * min(columns, at_once)

    def most_windowed(self, chunk_tokens: Count, block_size: int) -> Count:
        """Blocks of a windowed group that a chunk's queries see at most, their own positions included, wherever in a
        block it begins."""
        return (self.window + chunk_tokens + 2 * block_size - 3) // block_size

    def max_chunk(self, num_tokens: int, block_size: int, num_blocks: int) -> int:
        """The largest chunks in which a request of `num_tokens` can be computed in `num_blocks`; 0: it cannot."""
        columns = -(-num_tokens // block_size)
        if self.count * columns <= num_blocks:
            return num_tokens
        if not self.num_windowed:
            return 0
        at_once = (num_blocks - self.num_full * columns) // self.num_windowed
        return max((at_once - 1) * block_size + 2 - self.window, 0)

    def most_tokens(self, block_size: int, num_blocks: int, chunk_tokens: int = 1) -> int:
        """Tokens of the longest request that can be computed in `num_blocks`, in chunks of `chunk_tokens`; sys.maxsize:
        no limit."""
        columns = num_blocks // self.count
        at_once = self.most_windowed(chunk_tokens, block_size)
        if self.num_windowed and at_once <= columns:
            if not self.num_full:
                return sys.maxsize
            columns = (num_blocks - self.num_windowed * at_once) // self.num_full
        return columns * block_size


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Where each layer's keys and values are: in the blocks of its group, at its place among the layers of a block.

    groups      those that see all come first
    group_of    of each layer
    place_of    of each layer, from 0
    num_places  layers that a block has room for
    """

    groups: KVGroups
    group_of: tuple[int, ...]
    place_of: tuple[int, ...]
    num_places: int

    def share_of_block(self, num_bytes: int) -> int:
        """Of the bytes that all layers keep for a position, those of the layers of one block."""
        return num_bytes * self.num_places // max(len(self.place_of), 1)


def layer_groups(windows: Sequence[int], max_model_len: int, are_alike: bool) -> LayerGroups:
    """windows: of each layer, the positions that a query sees, itself included; 0: all. are_alike: whether all layers
    keep as many bytes for a position.

    Neighbouring layers with a window form groups of as many layers as there are without one. All layers form one group,
    with the widest window, where layers are not alike or more than a fifth of the memory would be padding. Without any
    layer, blocks keep nothing; they name the text that states of recurrent layers are kept for.
    """
    if not windows:
        return LayerGroups(KVGroups(), (), (), 0)
    windows = [window if window < max_model_len else 0 for window in windows]
    num_full = windows.count(0)
    num_windowed = len(windows) - num_full
    num_groups = -(-num_windowed // num_full) if num_full else 1
    num_unused = num_groups * num_full - num_windowed
    if not num_full or not num_windowed or not are_alike or 5 * num_unused > (1 + num_groups) * num_full:
        one = KVGroups() if num_full else KVGroups(0, 1, max(windows))
        return LayerGroups(one, (0,) * len(windows), tuple(range(len(windows))), len(windows))
    order = [i for i, window in enumerate(windows) if not window] + [i for i, window in enumerate(windows) if window]
    places = {layer: divmod(at, num_full) for at, layer in enumerate(order)}
    group_of, place_of = zip(*(places[layer] for layer in range(len(windows))), strict=True)
    return LayerGroups(KVGroups(1, num_groups, max(windows)), group_of, place_of, num_full)
