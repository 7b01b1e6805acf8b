"""Which layers share a KV block, and how many blocks a request needs at once.

Used by runners, which know their layers' windows and allocate the KV memory; by the scheduler, which admits what fits;
and by hosts, which refuse what never will. Invariant: a request that runs in a given memory never exceeds
`max_request_tokens`, so it can be admitted again after a preemption or by another engine.
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
"""One value, or one per row."""


class KVGroups(msgspec.Struct, frozen=True, array_like=True):
    """A block stores the keys and values of one group of layers for block_size positions of a request.

    num_full      groups whose layers attend to all positions: a request keeps their blocks
    num_windowed  groups whose layers attend to a window: blocks entirely outside it are freed
    window        positions that a query of those layers attends to, its own included
    """

    num_full: int = 1
    num_windowed: int = 0
    window: int = 0

    @property
    def count(self) -> int:
        return self.num_full + self.num_windowed

    def max_blocks(self, num_tokens: int, chunk_tokens: int, block_size: int) -> int:
        """Maximum number of blocks that a request of `num_tokens` holds at once if computed in chunks of
        `chunk_tokens`."""
        columns = -(-num_tokens // block_size)
        at_once = self.max_windowed_blocks(chunk_tokens, block_size)
        return self.num_full * columns + self.num_windowed * min(columns, at_once)

    def max_windowed_blocks(self, chunk_tokens: Count, block_size: int) -> Count:
        """Maximum number of blocks of a windowed group that a chunk's queries attend to, their own positions included,
        wherever in a block the chunk begins."""
        return (self.window + chunk_tokens + 2 * block_size - 3) // block_size

    def max_chunk(self, num_tokens: int, block_size: int, num_blocks: int) -> int:
        """The largest chunk size with which a request of `num_tokens` can be computed in `num_blocks`; 0 = none."""
        columns = -(-num_tokens // block_size)
        if self.count * columns <= num_blocks:
            return num_tokens
        if not self.num_windowed:
            return 0
        at_once = (num_blocks - self.num_full * columns) // self.num_windowed
        return max((at_once - 1) * block_size + 2 - self.window, 0)

    def max_request_tokens(self, block_size: int, num_blocks: int, chunk_tokens: int = 1) -> int:
        """Length of the longest request that can be computed in `num_blocks` in chunks of `chunk_tokens`; sys.maxsize =
        no limit."""
        columns = num_blocks // self.count
        at_once = self.max_windowed_blocks(chunk_tokens, block_size)
        if self.num_windowed and at_once <= columns:
            if not self.num_full:
                return sys.maxsize
            columns = (num_blocks - self.num_windowed * at_once) // self.num_full
        return columns * block_size


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Where each layer's keys and values are: in the blocks of its group, at its place within a block.

    groups      full groups first
    group_of    group of each layer
    place_of    place of each layer, from 0
    num_places  layers per block
    """

    groups: KVGroups
    group_of: tuple[int, ...]
    place_of: tuple[int, ...]
    num_places: int

    def share_of_block(self, num_bytes: int) -> int:
        """The part of `num_bytes`, the bytes per position in all layers, that belongs to one block."""
        return num_bytes * self.num_places // max(len(self.place_of), 1)


def layer_groups(windows: Sequence[int], max_model_len: int, are_alike: bool) -> LayerGroups:
    """windows: for each layer, the positions that a query attends to, its own included; 0 = all. are_alike: whether all
    layers store the same number of bytes per position.

    Neighbouring windowed layers form groups as large as the number of full layers. All layers form one group with the
    widest window if they are not alike, or if more than a fifth of the memory would be padding. Without attention
    layers, blocks are empty; they only name the prefixes whose recurrent states are cached.
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
