"""The pools of KV blocks, on the device and in host memory: which row holds which block, and which text a block holds.

For: the scheduler, which looks up the computed beginning of a text, reserves blocks for a step's tokens, and releases a
row's blocks at its end. Does not know: the KV memory itself (the runner's), requests, or why a block is needed.
Invariant: each device block is free (on the stack), cached (registered in the prefix cache and held by no row; the
least recently used is reused first) or used (held by as many rows as it counts); `check()` verifies it. Only full
blocks of computed tokens are registered, and no step writes to them after that.

A block may be given to another row while a step in flight still writes to it, because steps run in launch order: the
new row's writes come later, and it reads only what it has written. A late write never lands in a registered block: a
step writes behind what earlier steps of its row computed, and a block is registered only when the step that filled it
was committed. Where every layer has a window, a row gives back the blocks that lie wholly behind it while it goes on;
they stay cached like others. Allocating, freeing and finding cost O(1) per block; a step costs Python time only for
rows that need a new block or have filled one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby
from typing import Final

import numpy as np

from ..kv_groups import KVGroups
from ..step import Int32Array, KVCopies, RowTable
from .block_journal import BlockJournal, Salt
from .prefix_cache import Key, Parent, Prefix, PrefixCache

_Copy = tuple[bool, int, int]
"""Whether to the host; the device's block; the host's block."""

NEVER = np.iinfo(np.int32).max
"""A number of registered blocks that no row exceeds: its blocks are not shared."""
FREED_BLOCK: Final = -1
"""In a row's table, in place of a block behind the window: no step reads it."""
NOT_SHARED: Final = 0
"""What is before the blocks of a row that does not share them: no block has this identity."""
ONE_GROUP: Final = KVGroups()


class HostTier:
    """Host memory for KV blocks whose place on the device is given to others.

    A text is in one place, on the device or here, and is found through the same prefix cache, where host block h has
    the number num_device_blocks + h. Each host block is free, or kept (the least recently used is evicted first), or
    being reloaded. The copies that follow from this are handed out once, in order; the runner makes them.
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

    @property
    def num_cached_blocks(self) -> int:
        """Host blocks that hold a text."""
        return len(self._kept)

    def offload(self, block: int) -> None:
        """Keeps the text of a registered device block that is about to be reused, if it can be found, and if not all
        host blocks are being reloaded."""
        if not (self._free or self._kept) or not self._prefixes.is_found(block):
            self._prefixes.forget(block)
            return
        host_block = self._free.pop() if self._free else self._evict()
        self._prefixes.move(block, self._first + host_block)
        self._kept[host_block] = None
        self._copies.append((True, block, host_block))
        self.num_offloaded += 1

    def use_later(self, number: int) -> None:
        """A kept text is evicted after all others."""
        self._kept.move_to_end(number - self._first)

    def hold(self, numbers: list[int]) -> None:
        """These cached prefixes are about to be reloaded: none of them is evicted for another."""
        for number in numbers:
            del self._kept[number - self._first]

    def reload(self, number: int, block: int) -> None:
        """Copies a held text back into a block of the device."""
        host_block = number - self._first
        self._prefixes.move(number, block)
        self._free.append(host_block)
        self._copies.append((False, block, host_block))
        self.num_reloaded += 1

    def discard(self, number: int) -> None:
        """A kept text is not registered any more."""
        host_block = number - self._first
        del self._kept[host_block]
        self._free.append(host_block)

    def take_copies(self) -> list[KVCopies]:
        """The copies that the next step needs, in order."""
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

    def _evict(self) -> int:
        host_block, _ = self._kept.popitem(last=False)
        self._prefixes.forget(self._first + host_block)
        return host_block


def _batches(copies: list[_Copy]) -> Iterator[KVCopies]:
    """Runs of copies in one direction. A run reads nothing that it writes, so that of copies to one target only the
    last counts."""
    for to_host, run in groupby(copies, key=lambda copy: copy[0]):
        by_target = {copy[2] if to_host else copy[1]: copy for copy in run}
        blocks, host_blocks = zip(*((block, host_block) for _, block, host_block in by_target.values()), strict=True)
        yield KVCopies(to_host, np.array(blocks, np.int32), np.array(host_blocks, np.int32))


class KVCacheManager:
    """Owns the free stack, the cached blocks and the counts of rows per block; only it writes `table.block_table`."""

    def __init__(
        self,
        num_blocks: int,
        table: RowTable,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        groups: KVGroups = ONE_GROUP,
    ) -> None:
        self.num_blocks = num_blocks
        self._groups = groups
        self._window = groups.window
        self.block_size = table.block_size
        self._table = table
        self._block_table = table.block_table
        # Of each row: where its blocks end in its table, and how many at the beginning are freed already.
        self._held: Int32Array = np.zeros(table.max_num_seqs, np.int32)
        self._num_freed: Int32Array = np.zeros(table.max_num_seqs, np.int32)
        self._holders: Int32Array = np.zeros(num_blocks, np.int32)
        self._free: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._is_enabled = enable_prefix_caching
        self._prefixes = PrefixCache(num_blocks + num_host_blocks)
        self.host_tier = HostTier(self._prefixes, num_blocks, num_host_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Of each row: how many of its blocks are registered (they, or others of the same text), and the identity of the
        # last of them. `take` resets both.
        self._num_known: Int32Array = np.full(table.max_num_seqs, 0 if self._is_enabled else NEVER, np.int32)
        self._parent: list[Parent] = [()] * table.max_num_seqs

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: cached ones are reused when no others are left."""
        return self._num_free + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    # --- what fits ----------------------------------------------------------------------------------------------------

    def most_chunk(self, num_tokens: int) -> int:
        """The largest chunks in which a row of so many tokens can be computed in the whole memory; 0: it cannot."""
        return self._groups.most_chunk(num_tokens, self.block_size, self.num_blocks)

    def least_blocks(self, num_tokens: int) -> int:
        """Without which a row of so many tokens cannot be computed, in chunks of any size."""
        return self._groups.most_blocks(num_tokens, 1, self.block_size)

    def blocks_to_come(self, rows: Int32Array, chunk_tokens: int) -> int:
        """How many more blocks these rows will hold at once than now, each until its known tokens are computed in
        chunks of so many. What a chunk in flight will give back counts as given back."""
        num_tokens, computed = self._table.num_tokens[rows], self._table.num_computed_tokens[rows]
        columns = -(-num_tokens // self.block_size)
        to_come = np.maximum(columns - self._held[rows], 0)
        if self._window:
            chunks = np.minimum(chunk_tokens, num_tokens - computed)
            at_once = np.minimum(columns - self._num_freed[rows], self._groups.most_windowed(chunks, self.block_size))
            to_come = np.minimum(to_come, np.maximum(at_once - (self._held[rows] - self._num_freed[rows]), 0))
        return int(to_come.sum())

    def blocks_to_begin(self, prefix: Prefix, num_tokens: int, chunk_tokens: int) -> int:
        """How many of the free blocks a waiting row of so many tokens takes at once at most, behind its prefix. Blocks
        of the prefix that other rows use are not free."""
        num_hit = len(prefix.blocks) * self.block_size
        unseen = self._first_seen(num_hit)
        used = [block for block in prefix.blocks[unseen:] if block < self.num_blocks and self._holders[block]]
        most = -(-num_tokens // self.block_size) - unseen - len(used)
        if self._window:
            most = min(most, self._groups.most_windowed(min(chunk_tokens, num_tokens - num_hit), self.block_size))
        return most

    # --- blocks of rows -----------------------------------------------------------------------------------------------

    def reserve(self, rows: Int32Array, num_tokens: Int32Array) -> bool:
        """Gives each row the blocks for `num_tokens[i]` tokens: all of them and True, or none and False."""
        missing = np.maximum(-(-num_tokens // self.block_size) - self._held[rows], 0)
        if missing.sum() > self.num_free_blocks:
            return False
        for i in missing.nonzero()[0].tolist():
            self._take(int(rows[i]), int(missing[i]))
        return True

    def release(self, row: int) -> None:
        """Frees all blocks of a row, the last one first: the end of a text is reused before its beginning, which is
        more likely to be shared."""
        self._give_back(self._blocks_of(row))
        self._held[row] = self._num_freed[row] = 0

    def tell(self, journal: BlockJournal | None) -> None:
        """From now on `journal` hears which blocks can be found by any request; None = nobody does. Where prefix
        caching is off there are none."""
        self._prefixes.tell(journal if self._is_enabled else None)

    # --- prefixes that are shared -------------------------------------------------------------------------------------

    def find(self, token_ids: Int32Array, salt: Salt, group: str = "") -> Prefix:
        """The computed beginning of a text, for a row without blocks; never its last token, whose logits are needed.
        Blocks from num_blocks on are in host memory. group: where caching is off, only rows of one group share."""
        if not self._is_enabled:
            if not group:
                return Prefix([], NOT_SHARED, None)
            salt = (*salt, group)
        num_full = (len(token_ids) - 1) // self.block_size
        data = token_ids[: num_full * self.block_size].tobytes()
        return self._prefixes.find(salt, data, self._bytes_per_block)

    def take(self, row: int, prefix: Prefix) -> int:
        """Gives a row without blocks the prefix that was found; returns its tokens."""
        count = len(prefix.blocks)
        first = self._first_seen(count * self.block_size)
        self._num_known[row] = NEVER if prefix.parent == NOT_SHARED else count
        self._parent[row] = prefix.parent
        self._use_later(prefix.blocks[:first])
        blocks = np.array(prefix.blocks[first:], np.int32)
        on_device = blocks < self.num_blocks
        for block in blocks.tolist():
            self._cached.pop(block, None)
        self._holders[blocks[on_device]] += 1
        if not on_device.all():
            blocks[~on_device] = self._reload(blocks[~on_device].tolist())
        self._block_table[row, :first], self._block_table[row, first:count] = FREED_BLOCK, blocks
        self._num_freed[row], self._held[row] = first, count
        return count * self.block_size

    def register(self, rows: Int32Array, num_tokens: Int32Array) -> None:
        """The KV of each row's first `num_tokens[i]` tokens is computed without errors: its full blocks can be found
        from now on, and those that no later query sees are free."""
        num_full = num_tokens // self.block_size
        for i in (num_full > self._num_known[rows]).nonzero()[0].tolist():
            self._register(int(rows[i]), int(num_full[i]))
        if self._window:
            first_seen = np.maximum(num_tokens - self._window + 1, 0) // self.block_size
            for i in (first_seen > self._num_freed[rows]).nonzero()[0].tolist():
                self._free_behind_window(int(rows[i]), int(num_tokens[i]))

    def next_keys(self, rows: Int32Array) -> set[Key]:
        """The blocks that these rows compute next: of each row, the key of the first full block of its known tokens
        that is not registered yet."""
        at = self._num_known[rows]
        unfinished = (self._table.num_tokens[rows] // self.block_size > at).nonzero()[0].tolist()
        return {
            (self._parent[row], self._tokens(row, first, first + 1))
            for row, first in ((int(rows[i]), int(at[i])) for i in unfinished)
        }

    def invalidate(self, row: int) -> None:
        """The row failed, so none of its blocks is found any more: neither those that it computed, which may be bad,
        nor those that it found, which may be the cause. Other rows that use them go on."""
        if self._num_freed[row] and isinstance(last := self._parent[row], int):
            for block in self._prefixes.forget_through(last):
                self._discard(block)
        for block in self._blocks_of(row).tolist():
            self._prefixes.forget(block)

    def contents(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        """What is in each block, int32 [num_blocks] each: 0 free, 1 cached, 2 used; by how many rows; one of them, or
        -1."""
        states: Int32Array = np.where(self._holders > 0, 2, 0).astype(np.int32)
        if self._cached:
            states[np.fromiter(self._cached, np.int32, len(self._cached))] = 1
        rows: Int32Array = np.full(self.num_blocks, -1, np.int32)
        for row in self._held.nonzero()[0].tolist():
            rows[self._blocks_of(row)] = row
        return states, self._holders, rows

    def check(self) -> None:
        """Raises AssertionError unless each block is exactly one of free, cached and used."""
        tables = [self._blocks_of(row) for row in range(len(self._held))]
        holders = np.bincount(np.concatenate(tables), minlength=self.num_blocks)
        unused = np.concatenate([self._free[: self._num_free], np.array(list(self._cached), np.int32)])
        known = np.concatenate([unused, holders.nonzero()[0]])
        if len(known) != self.num_blocks or not (np.bincount(known, minlength=self.num_blocks) == 1).all():
            raise AssertionError(f"KV blocks are lost or held twice: {len(known)} known of {self.num_blocks}")
        if len(holders) != self.num_blocks or (holders != self._holders).any():
            raise AssertionError("KV blocks are lost or held twice: the counts of their holders are wrong")
        is_registered = [block in self._prefixes for block in unused.tolist()]
        if is_registered != [False] * self._num_free + [True] * len(self._cached):
            raise AssertionError("a free block is found as a text, or a cached one is not")
        self._prefixes.check()
        self.host_tier.check()
        self._check_texts()

    @property
    def _bytes_per_block(self) -> int:
        return self.block_size * self._table.token_ids.itemsize

    def _check_texts(self) -> None:
        """Raises AssertionError unless each registered block that a row holds has the row's tokens."""
        for row, first in enumerate(self._num_freed.tolist()):
            for index, block in enumerate(self._blocks_of(row).tolist(), first):
                if self._prefixes.tokens_of(block) not in (None, self._tokens(row, index, index + 1)):
                    raise AssertionError(f"row {row} holds block {block} of another text")

    def _tokens(self, row: int, first_block: int, end_block: int) -> bytes:
        return self._table.token_ids[row, first_block * self.block_size : end_block * self.block_size].tobytes()

    def _register(self, row: int, num_full: int) -> None:
        first, size = int(self._num_known[row]), self._bytes_per_block
        data, parent = self._tokens(row, first, num_full), self._parent[row]
        for index, block in enumerate(self._block_table[row, first:num_full].tolist()):
            parent = self._prefixes.register(parent, data[index * size : (index + 1) * size], block)
        self._num_known[row], self._parent[row] = num_full, parent

    def _blocks_of(self, row: int) -> Int32Array:
        """The blocks that a row holds."""
        blocks: Int32Array = self._block_table[row, self._num_freed[row] : self._held[row]]
        return blocks

    def _give_back(self, blocks: Int32Array) -> None:
        """A row holds these blocks no more, the first of which are reused last."""
        blocks = blocks[::-1]
        self._holders[blocks] -= 1
        unused = blocks[self._holders[blocks] == 0]
        if len(self._prefixes):
            unused = self._keep_cached(unused)
        self._free[self._num_free : self._num_free + len(unused)] = unused
        self._num_free += len(unused)

    def _first_seen(self, num_tokens: int) -> int:
        """The first block that queries behind so many tokens see."""
        return max(num_tokens - self._window + 1, 0) // self.block_size if self._window else 0

    def _free_behind_window(self, row: int, num_tokens: int) -> None:
        """Frees the blocks that no query sees once so many tokens are computed."""
        first, end = int(self._num_freed[row]), self._first_seen(num_tokens)
        self._give_back(self._block_table[row, first:end])
        self._block_table[row, first:end] = FREED_BLOCK
        self._num_freed[row] = end

    def _use_later(self, blocks: list[int]) -> None:
        """Cached blocks at the beginning of a text that is used are reused last, the first of them after the others."""
        for block in reversed(blocks):
            if block >= self.num_blocks:
                self.host_tier.use_later(block)
            elif block in self._cached:
                self._cached.move_to_end(block)

    def _discard(self, block: int) -> None:
        """A block, of the device or of the host, is not registered any more: it is free, unless a row uses it."""
        if block >= self.num_blocks:
            self.host_tier.discard(block)
        elif block in self._cached:
            del self._cached[block]
            self._free[self._num_free] = block
            self._num_free += 1

    def _take(self, row: int, count: int) -> None:
        held = int(self._held[row])
        self._block_table[row, held : held + count] = self._allocate(count)
        self._held[row] = held + count

    def _reload(self, host_numbers: list[int]) -> Int32Array:
        """Copies texts from host memory into new blocks, used by one row each."""
        self.host_tier.hold(host_numbers)
        blocks = self._allocate(len(host_numbers))
        for number, block in zip(host_numbers, blocks.tolist(), strict=True):
            self.host_tier.reload(number, block)
        return blocks

    def _allocate(self, count: int) -> Int32Array:
        """`count` of the free blocks, used by one row each from now on."""
        from_stack = min(count, self._num_free)
        top = self._num_free - from_stack
        blocks = self._free[top : self._num_free][::-1]
        if from_stack < count:
            blocks = np.concatenate([blocks, np.array([self._reuse() for _ in range(count - from_stack)], np.int32)])
        self._holders[blocks] = 1
        self._num_free = top
        return blocks

    def _reuse(self) -> int:
        """Takes the least recently used cached block; its text goes to host memory, if there is any."""
        block, _ = self._cached.popitem(last=False)
        if self.host_tier.num_blocks:
            self.host_tier.offload(block)
        else:
            self._prefixes.forget(block)
        return block

    def _keep_cached(self, unused: Int32Array) -> Int32Array:
        """Keeps the unused blocks that hold a registered text in the cache; returns the others."""
        is_registered = np.array([block in self._prefixes for block in unused.tolist()], np.bool_)
        self._cached.update(dict.fromkeys(unused[is_registered].tolist()))
        return unused[~is_registered]
