"""Host memory for KV blocks whose place on the device is given to others: which of its blocks holds which text.

For: the block pool, which hands over a cached block before it reuses it, and takes a text back when a request begins
with it. Does not know: rows, requests, the memory itself (the runner's). Invariants: a text is in one place, on the
device or here, and is found through the same prefix cache, where host block h has the number num_device_blocks + h;
each host block is free, or kept (the longest unused is given up first), or on its way back; and the copies that
follow from all that are handed out once, in the order in which they were asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from .prefix_cache import PrefixCache
from .step import KVCopies

_Copy = tuple[bool, int, int]
"""Whether it goes to the host; the device's block; the host's block."""


class HostTier:
    def __init__(self, prefixes: PrefixCache, num_device_blocks: int, num_host_blocks: int) -> None:
        self.num_blocks = num_host_blocks
        self.num_offloaded = 0
        self.num_reloaded = 0
        self._prefixes = prefixes
        self._first = num_device_blocks
        self._free = list(range(num_host_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._copies: list[_Copy] = []

    @property
    def num_cached_blocks(self) -> int:
        """Host blocks that hold a text."""
        return len(self._kept)

    def offload(self, block: int) -> None:
        """A registered block of the device is about to be reused: its text is kept here, if anybody can find it, and
        not all that is here is on its way back."""
        if not (self._free or self._kept) or not self._prefixes.is_found(block):
            self._prefixes.forget(block)
            return
        host_block = self._free.pop() if self._free else self._give_up()
        self._prefixes.move(block, self._first + host_block)
        self._kept[host_block] = None
        self._copies.append((True, block, host_block))
        self.num_offloaded += 1

    def hold(self, numbers: list[int]) -> None:
        """These texts are about to be reloaded: none of them is given up for another."""
        for number in numbers:
            del self._kept[number - self._first]

    def reload(self, number: int, block: int) -> None:
        """Brings a held text back into a block of the device."""
        host_block = number - self._first
        self._prefixes.move(number, block)
        self._free.append(host_block)
        self._copies.append((False, block, host_block))
        self.num_reloaded += 1

    def take_copies(self) -> list[KVCopies]:
        """The copies that the next step needs, in the order in which they are to be made."""
        copies, self._copies = self._copies, []
        return list(_batches(copies))

    def check(self) -> None:
        """Raises AssertionError unless each host block is free, or kept and found as a text."""
        if sorted([*self._free, *self._kept]) != list(range(self.num_blocks)):
            raise AssertionError(f"host blocks are lost or held twice: {len(self._free)} free, {len(self._kept)} kept")
        if any(self._first + host_block in self._prefixes for host_block in self._free):
            raise AssertionError("a free host block is found as a text")
        if any(self._first + host_block not in self._prefixes for host_block in self._kept):
            raise AssertionError("a host block is kept and not found")

    def _give_up(self) -> int:
        host_block, _ = self._kept.popitem(last=False)
        self._prefixes.forget(self._first + host_block)
        return host_block


def _batches(copies: list[_Copy]) -> Iterator[KVCopies]:
    """Runs of one direction. Inside of one nothing is read that it writes, so that of copies to one target only the
    last counts."""
    for to_host, run in groupby(copies, key=lambda copy: copy[0]):
        by_target = {copy[2] if to_host else copy[1]: copy for copy in run}
        blocks, host_blocks = zip(*((block, host_block) for _, block, host_block in by_target.values()), strict=True)
        yield KVCopies(to_host, np.array(blocks, np.int32), np.array(host_blocks, np.int32))
