"""KV blocks in host memory: which tokens each block caches, and the resulting copies.

Used by the manager of the device's blocks; the memory itself is the runner's. Invariants: a cached block is in one
place, on the device or here; copies are handed out once, in the order in which they must be made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby

import numpy as np

from ..step import KVCopies
from .prefix_cache import PrefixCache

_Copy = tuple[bool, int, int]
"""Whether to the host; device block; host block."""


class HostTier:
    """Keeps KV blocks evicted from the device.

    Host blocks are found through the same prefix cache, in which host block h has the number num_device_blocks + h.
    Each host block is free, cached (the least recently used is evicted first) or being reloaded. The runner makes the
    resulting copies.
    """

    def __init__(self, prefixes: PrefixCache, num_device_blocks: int, num_host_blocks: int) -> None:
        self.num_blocks = num_host_blocks
        self.num_offloaded = 0
        self.num_reloaded = 0
        self._prefixes = prefixes
        self._first = num_device_blocks
        self._free = list(range(num_host_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._copies: list[_Copy] = []

    def offload(self, block: int) -> None:
        """Keeps the contents of a registered device block that is about to be reused, if they can still be found and
        not all host blocks are being reloaded."""
        if not (self._free or self._kept) or not self._prefixes.is_found(block):
            self._prefixes.forget(block)
            return
        host_block = self._free.pop() if self._free else self._evict()
        self._prefixes.move(block, self._first + host_block)
        self._kept[host_block] = None
        self._copies.append((True, block, host_block))
        self.num_offloaded += 1

    def use_later(self, number: int) -> None:
        """Makes a cached block the last to be evicted."""
        self._kept.move_to_end(number - self._first)

    def hold(self, numbers: list[int]) -> None:
        """Protects cached prefixes that are about to be reloaded from eviction."""
        for number in numbers:
            del self._kept[number - self._first]

    def reload(self, number: int, block: int) -> None:
        """Copies a held block back into a device block."""
        host_block = number - self._first
        self._prefixes.move(number, block)
        self._free.append(host_block)
        self._copies.append((False, block, host_block))
        self.num_reloaded += 1

    def discard(self, number: int) -> None:
        """Drops a cached block that is no longer registered."""
        host_block = number - self._first
        del self._kept[host_block]
        self._free.append(host_block)

    def take_copies(self) -> list[KVCopies]:
        """The copies that the next step needs, in order."""
        copies, self._copies = self._copies, []
        return list(_batches(copies))

    def check(self) -> None:
        """Raises AssertionError unless each host block is either free, or cached and found."""
        if sorted([*self._free, *self._kept]) != list(range(self.num_blocks)):
            raise AssertionError(f"host blocks are lost or held twice: {len(self._free)} free, {len(self._kept)} kept")
        if any(self._first + host_block in self._prefixes for host_block in self._free):
            raise AssertionError("a free host block is registered")
        if any(self._first + host_block not in self._prefixes for host_block in self._kept):
            raise AssertionError("a host block is cached but not registered")

    def _evict(self) -> int:
        host_block, _ = self._kept.popitem(last=False)
        self._prefixes.forget(self._first + host_block)
        return host_block


def _batches(copies: list[_Copy]) -> Iterator[KVCopies]:
    """Runs of copies in one direction. No run reads what it writes, so of several copies to one target only the last
    counts."""
    for to_host, run in groupby(copies, key=lambda copy: copy[0]):
        by_target = {copy[2] if to_host else copy[1]: copy for copy in run}
        blocks, host_blocks = zip(*((block, host_block) for _, block, host_block in by_target.values()), strict=True)
        yield KVCopies(to_host, np.array(blocks, np.int32), np.array(host_blocks, np.int32))
