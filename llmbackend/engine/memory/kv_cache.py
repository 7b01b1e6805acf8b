"""The pools of KV blocks, on the device and in host memory: which rows hold a block, and which tokens it caches.

The scheduler looks up cached prefixes, reserves blocks for a step's tokens, and releases a row's blocks at its end. The
KV memory itself is the runner's. Invariant: each device block is free (on the stack), cached (registered in the prefix
cache but held by no row; the least recently used is reused first) or used (with a count of the rows that hold it);
`check()` verifies it. Only full blocks of computed tokens are registered, and no step writes to them afterwards.

A block may be reassigned while a step in flight still writes to it, because steps run in launch order: the new row
writes later, and reads only what it has written. A late write never hits a registered block, because a step writes only
after what earlier steps of its row computed, and a block is registered only once the step that filled it is committed.

If layers have a window, a running row frees blocks entirely outside it; they stay cached like others. If only some
layers have one, each block belongs to one group of layers (kv_groups.py). The row's blocks are then those of the
full-attention group, which are the ones registered in the prefix cache; the blocks of the windowed groups are their
parts (window_parts.py). A prefix is found up to the last point at which all parts within the next query's window still
exist.

Allocating, freeing and finding are O(1) per block; a step costs Python time only for rows that need a new block or have
filled one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Final

import numpy as np

from ..kv_groups import KVGroups
from ..step import BoolArray, Int32Array, RowTable
from .host_tier import HostTier
from .prefix_cache import BlockJournal, Key, Parent, Prefix, PrefixCache, Salt
from .state_slots import StateSlots
from .window_parts import FREED_BLOCK, WindowParts

NEVER = np.iinfo(np.int32).max
"""A count of registered blocks that no row reaches: the row's blocks are not shared."""
NOT_SHARED: Final = 0
"""Parent of a row whose blocks are not shared; no block has this identity."""
NO_PREFIX: Final = Prefix(np.zeros(0, np.int32), np.zeros(0, np.int64), NOT_SHARED, None)
ONE_GROUP: Final = KVGroups()


class KVCacheManager:
    """Owns the free stack, the cached blocks and the reference counts; the only writer of `table.block_tables`."""

    def __init__(
        self,
        num_blocks: int,
        table: RowTable,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        groups: KVGroups = ONE_GROUP,
        num_state_slots: int = 0,
    ) -> None:
        """num_state_slots: for recurrent states; 0 = the model has no recurrent layers."""
        self.num_blocks = num_blocks
        self._groups = groups
        self._window = groups.window
        self.block_size = table.block_size
        self._table = table
        self._block_table = table.block_table
        # Per row: the end of its blocks in its tables, and how many leading ones are outside the window.
        self._held: Int32Array = np.zeros(table.max_num_seqs, np.int32)
        self._num_freed: Int32Array = np.zeros(table.max_num_seqs, np.int32)
        self._holders: Int32Array = np.zeros(num_blocks, np.int32)
        self._free: Int32Array = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._is_enabled = enable_prefix_caching
        self._prefixes = PrefixCache(num_blocks + num_host_blocks)
        self.host_tier = HostTier(self._prefixes, num_blocks, num_host_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Least recently used first: blocks, and ~block for a block's part, which may be evicted earlier."""
        self._num_cached_parts = 0
        self.states = StateSlots(num_state_slots, table) if num_state_slots else None
        both = groups.num_full and groups.num_windowed
        assert not (both and num_host_blocks), "host blocks are of all layers"
        self._parts = WindowParts(table.block_tables[1:], num_blocks) if both else None
        # Per row: how many of its blocks are registered (themselves, or others with the same tokens), and the identity
        # of the last one. `take` resets both.
        self._num_known: Int32Array = np.full(table.max_num_seqs, 0 if self._is_enabled else NEVER, np.int32)
        self._parent: list[Parent] = [()] * table.max_num_seqs

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, including cached ones, which are reused once no others are left."""
        return self._num_free + self.num_cached_blocks

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached) + self._num_cached_parts * (self._groups.num_windowed - 1)

    # --- capacity -----------------------------------------------------------------------------------------------------

    @property
    def has_state_slot(self) -> bool:
        """Whether a further row could get a state slot, if rows need one."""
        return self.states is None or self.states.has_room

    def max_chunk(self, num_tokens: int) -> int:
        """The largest chunk size with which a row of `num_tokens` can be computed in the whole memory; 0 = none."""
        return self._groups.max_chunk(num_tokens, self.block_size, self.num_blocks)

    def min_blocks(self, num_tokens: int) -> int:
        """Minimum number of blocks with which a row of `num_tokens` can be computed with any chunk size."""
        return self._groups.max_blocks(num_tokens, 1, self.block_size)

    def future_blocks(self, rows: Int32Array, chunk_tokens: int) -> int:
        """How many more blocks these rows will hold at once until their known tokens are computed in chunks of
        `chunk_tokens`. Blocks that a chunk in flight will free count as free."""
        num_tokens, computed = self._table.num_tokens[rows], self._table.num_computed_tokens[rows]
        columns = -(-num_tokens // self.block_size)
        missing = np.maximum(columns - self._held[rows], 0)
        to_come = self._groups.num_full * missing
        if self._window:
            chunks = np.minimum(chunk_tokens, num_tokens - computed)
            at_once = np.minimum(
                columns - self._num_freed[rows], self._groups.max_windowed_blocks(chunks, self.block_size)
            )
            more = np.maximum(at_once - (self._held[rows] - self._num_freed[rows]), 0)
            to_come = to_come + self._groups.num_windowed * np.minimum(missing, more)
        return int(to_come.sum())

    def blocks_to_begin(self, prefix: Prefix, num_tokens: int, chunk_tokens: int) -> int:
        """Maximum number of free blocks that a waiting row of `num_tokens` takes at once after its prefix. Blocks of
        the prefix that other rows use are not free."""
        groups, columns, num_hit = self._groups, -(-num_tokens // self.block_size), len(prefix.blocks) * self.block_size
        needed = groups.num_full * (columns - _num_used(prefix.blocks, self._holders))
        if self._window:
            unseen = self._first_seen(num_hit)
            holders = self._holders if self._parts is None else self._parts.holders
            most = columns - unseen - _num_used(prefix.blocks[unseen:], holders)
            at_once = groups.max_windowed_blocks(min(chunk_tokens, num_tokens - num_hit), self.block_size)
            needed += groups.num_windowed * min(most, at_once)
        return needed

    # --- blocks of rows -----------------------------------------------------------------------------------------------

    def reserve(self, rows: Int32Array, num_tokens: Int32Array) -> bool:
        """Gives each row blocks for `num_tokens[i]` tokens; all or nothing. Returns whether it did."""
        missing = np.maximum(-(-num_tokens // self.block_size) - self._held[rows], 0)
        if missing.sum() * self._groups.count > self.num_free_blocks:
            return False
        for i in missing.nonzero()[0].tolist():
            self._take(int(rows[i]), int(missing[i]))
        return True

    def release(self, row: int) -> None:
        """Frees all blocks of a row, the last one first, so that the end of a sequence is reused before its beginning,
        which is more likely to be shared."""
        blocks = self._blocks_of(row)
        if self._parts is not None:
            first = int(self._num_freed[row])
            self._give_back_parts(self._parts.leave(row, first, blocks[first:]))
        self._give_back(blocks)
        self._held[row] = self._num_freed[row] = 0
        if self.states is not None:
            self.states.release(row)

    def plan(self, rows: Int32Array, num_tokens: Int32Array) -> None:
        """Announces that the next step computes `num_tokens[i]` tokens of each row."""
        if self.states is not None:
            are_shared = self._num_known[rows] != NEVER
            self.states.plan(rows[are_shared], num_tokens[are_shared], self.block_size)

    def set_journal(self, journal: BlockJournal | None) -> None:
        """Sets the journal of the blocks that requests can find; None = none. Without prefix caching it stays empty."""
        self._prefixes.set_journal(journal if self._is_enabled else None)

    # --- shared prefixes ----------------------------------------------------------------------------------------------

    def find(self, token_ids: Int32Array, salt: Salt, group: str = "", last: Prefix | None = None) -> Prefix:
        """The cached prefix of these tokens, for a row without blocks. Excludes the last token, whose logits are
        needed. Blocks from num_blocks on are in host memory. `usable` gives the part that a row can start with.

        group: without prefix caching, only rows of one group share. last: the result of an earlier call with the same
        tokens, salt and group; returned at little cost if it still holds.
        """
        if not self._is_enabled:
            if not group:
                return NO_PREFIX
            salt = (*salt, group)
        if last is not None and self._prefixes.is_current(last):
            return last
        num_full = (len(token_ids) - 1) // self.block_size
        data = token_ids[: num_full * self.block_size].tobytes()
        return self._prefixes.find(salt, data, self._bytes_per_block)

    def usable(self, prefix: Prefix) -> Prefix:
        """The part of a found prefix with which a row can start now."""
        if self.states is None and self._parts is None:
            return prefix
        ends = np.arange(1, len(prefix.blocks) + 1, dtype=np.int32)
        if self._parts is not None:
            ends = self._ends_within_parts(prefix, self._parts)
        if self.states is not None:
            return self._up_to_a_state(prefix, self.states, ends)
        return self._prefixes.shortened(prefix, int(ends[-1]) if len(ends) else 0)

    def take(self, row: int, prefix: Prefix) -> int:
        """Gives a usable prefix to a row without blocks; returns its length in tokens."""
        count = len(prefix.blocks)
        first = self._first_seen(count * self.block_size)
        begin = 0 if self._groups.num_full else first
        self._num_known[row] = NEVER if prefix.parent == NOT_SHARED else count
        self._parent[row] = prefix.parent
        self._use_later(prefix.blocks[:begin].tolist())
        blocks = prefix.blocks[begin:].copy()
        on_device = blocks < self.num_blocks
        for block in blocks.tolist():
            self._cached.pop(block, None)
        self._holders[blocks[on_device]] += 1
        if not on_device.all():
            blocks[~on_device] = self._reload(blocks[~on_device].tolist())
        self._block_table[row, :begin], self._block_table[row, begin:count] = FREED_BLOCK, blocks
        if self._parts is not None:
            for block in blocks[first:].tolist():
                if ~block in self._cached:
                    del self._cached[~block]
                    self._num_cached_parts -= 1
            self._parts.take(row, first, blocks[first:])
        self._num_freed[row], self._held[row] = first, count
        if self.states is not None:
            self.states.take(row, prefix.parent if count and isinstance(prefix.parent, int) else None)
        return count * self.block_size

    def register(self, rows: Int32Array, num_tokens: Int32Array) -> None:
        """The KV of each row's first `num_tokens[i]` tokens was computed without errors: registers full blocks, and
        frees those that no later query attends to."""
        num_full = num_tokens // self.block_size
        for i in (num_full > self._num_known[rows]).nonzero()[0].tolist():
            self._register(int(rows[i]), int(num_full[i]))
        if self.states is not None:
            self.states.computed(rows)
        if self._window:
            first_seen = np.maximum(num_tokens - self._window + 1, 0) // self.block_size
            for i in (first_seen > self._num_freed[rows]).nonzero()[0].tolist():
                self._free_behind_window(int(rows[i]), int(num_tokens[i]))

    def next_keys(self, rows: Int32Array) -> set[Key]:
        """The keys of the blocks that these rows compute next: of each row, the first full block of its known tokens
        that is not registered yet."""
        at = self._num_known[rows]
        unfinished = (self._table.num_tokens[rows] // self.block_size > at).nonzero()[0].tolist()
        return {
            (self._parent[row], self._tokens(row, first, first + 1))
            for row, first in ((int(rows[i]), int(at[i])) for i in unfinished)
        }

    def invalidate(self, row: int) -> None:
        """The row failed, so none of its blocks is found from now on: neither those it computed, which may be bad, nor
        those it found, which may be the cause. Other rows that use them continue."""
        if self._first_held(row) and isinstance(last := self._parent[row], int):
            for block in self._prefixes.forget_through(last):
                self._discard(block)
        for block in self._blocks_of(row).tolist():
            self._prefixes.forget(block)
            self._discard_part(block)

    def contents(self) -> tuple[Int32Array, Int32Array, Int32Array]:
        """For each block, int32 [num_blocks]: its state (0 free, 1 cached, 2 used), how many rows hold it, and one of
        them or -1."""
        states: Int32Array = np.where(self._holders > 0, 2, 0).astype(np.int32)
        states[[entry for entry in self._cached if entry >= 0]] = 1
        rows: Int32Array = np.full(self.num_blocks, -1, np.int32)
        for row in self._held.nonzero()[0].tolist():
            rows[self._blocks_of(row)] = row
        if self._parts is None:
            return states, self._holders, rows
        holders = self._holders.copy()
        blocks, parts = self._parts.all()
        holders[parts] = self._parts.holders[blocks, None]
        states[parts] = np.where(holders[parts] > 0, 2, 1)
        for row in self._held.nonzero()[0].tolist():
            rows[self._table.block_tables[1:, row, self._num_freed[row] : self._held[row]]] = row
        return states, holders, rows

    def check(self) -> None:
        """Raises AssertionError unless each block is exactly one of free, cached and used."""
        tables = [self._blocks_of(row) for row in range(len(self._held))]
        holders = np.bincount(np.concatenate(tables), minlength=self.num_blocks)
        free, cached = self._free[: self._num_free], [entry for entry in self._cached if entry >= 0]
        known = np.concatenate([free, np.array(cached, np.int32), holders.nonzero()[0]])
        if self._parts is not None:
            known = np.concatenate([known, self._check_parts(self._parts)])
        if len(known) != self.num_blocks or not (np.bincount(known, minlength=self.num_blocks) == 1).all():
            raise AssertionError(f"KV blocks are lost or held twice: {len(known)} known of {self.num_blocks}")
        if len(holders) != self.num_blocks or (holders != self._holders).any():
            raise AssertionError("KV blocks are lost or held twice: the counts of their holders are wrong")
        if any(block in self._prefixes for block in free.tolist()) or any(one not in self._prefixes for one in cached):
            raise AssertionError("a free block is registered, or a cached one is not")
        self._prefixes.check()
        self.host_tier.check()
        if self.states is not None:
            self.states.check()
        self._check_texts()

    @property
    def _bytes_per_block(self) -> int:
        return self.block_size * self._table.token_ids.itemsize

    def _check_parts(self, parts: WindowParts) -> Int32Array:
        """All blocks that are parts. Raises AssertionError unless each is held, or cached for a registered block."""
        firsts = self._num_freed.tolist()
        parts.check([(row, first, self._blocks_of(row)[first:]) for row, first in enumerate(firsts)])
        blocks, found = parts.all()
        cached = [~entry for entry in self._cached if entry < 0]
        unused = blocks[parts.holders[blocks] == 0].tolist()
        if sorted(cached) != unused or len(cached) != self._num_cached_parts:
            raise AssertionError("a part is neither held nor cached, or both")
        if any(block not in self._prefixes for block in cached):
            raise AssertionError("a part is cached for a block that is not registered")
        return found.reshape(-1)

    def _check_texts(self) -> None:
        """Raises AssertionError unless each registered block that a row holds stores the row's tokens."""
        for row in range(len(self._held)):
            for index, block in enumerate(self._blocks_of(row).tolist(), self._first_held(row)):
                if self._prefixes.tokens_of(block) not in (None, self._tokens(row, index, index + 1)):
                    raise AssertionError(f"row {row} holds block {block} with other tokens")

    def _tokens(self, row: int, first_block: int, end_block: int) -> bytes:
        return self._table.token_ids[row, first_block * self.block_size : end_block * self.block_size].tobytes()

    def _register(self, row: int, num_full: int) -> None:
        first, size = int(self._num_known[row]), self._bytes_per_block
        data, parent = self._tokens(row, first, num_full), self._parent[row]
        for index, block in enumerate(self._block_table[row, first:num_full].tolist()):
            tokens = data[index * size : (index + 1) * size]
            if self._parts is not None:
                self._replace_without_part(self._parts, parent, tokens, block)
            parent = self._prefixes.register(parent, tokens, block)
            if self.states is not None and isinstance(parent, int):
                self.states.reached(row, (first + index + 1) * self.block_size, parent)
        self._num_known[row], self._parent[row] = num_full, parent

    def _replace_without_part(self, parts: WindowParts, parent: Parent, tokens: bytes, block: int) -> None:
        """If another block is registered for these tokens but has lost its part, registers `block` in its place."""
        known = self._prefixes.block_of(parent, tokens)
        if known is not None and known != block and not parts.has(known):
            self._prefixes.move(known, block)
            self._discard(known)

    def _up_to_a_state(self, prefix: Prefix, states: StateSlots, ends: Int32Array) -> Prefix:
        """The longest part of a prefix after which a recurrent state is cached, at one of `ends`. Its `missing` remains
        that of the whole prefix, because a row that computes it will save a state."""
        identities = prefix.identities.tolist()
        count = next((end for end in reversed(ends.tolist()) if states.keeps(identities[end - 1])), 0)
        return replace(self._prefixes.shortened(prefix, count), missing=prefix.missing)

    def _ends_within_parts(self, prefix: Prefix, parts: WindowParts) -> Int32Array:
        """How many of a prefix's blocks a row could start with, such that no later query attends to a lost part."""
        places = np.arange(len(prefix.blocks), dtype=np.int32)
        lost_before = np.maximum.accumulate(np.where(parts.present(prefix.blocks), -1, places))
        first_seen = np.maximum((places + 1) * self.block_size - self._window + 1, 0) // self.block_size
        usable: Int32Array = places[lost_before < first_seen] + 1
        return usable

    def _first_held(self, row: int) -> int:
        return 0 if self._groups.num_full else int(self._num_freed[row])

    def _blocks_of(self, row: int) -> Int32Array:
        """The blocks that a row holds."""
        blocks: Int32Array = self._block_table[row, self._first_held(row) : self._held[row]]
        return blocks

    def _give_back(self, blocks: Int32Array) -> None:
        """Releases blocks of a row; the first of them are reused last."""
        blocks = blocks[::-1]
        self._holders[blocks] -= 1
        unused = blocks[self._holders[blocks] == 0]
        is_registered = self._are_registered(unused)
        self._cached.update(dict.fromkeys(unused[is_registered].tolist()))
        self._add_free(unused[~is_registered])

    def _give_back_parts(self, blocks: Int32Array) -> None:
        """No row needs the parts of these blocks any more."""
        assert self._parts is not None
        blocks = blocks[::-1]
        is_registered = self._are_registered(blocks)
        self._cached.update(dict.fromkeys((~blocks[is_registered]).tolist()))
        self._num_cached_parts += int(np.count_nonzero(is_registered))
        self._add_free(self._parts.detach(blocks[~is_registered]))

    def _are_registered(self, blocks: Int32Array) -> BoolArray:
        if not len(self._prefixes):
            return np.zeros(len(blocks), np.bool_)
        return np.array([block in self._prefixes for block in blocks.tolist()], np.bool_)

    def _add_free(self, blocks: Int32Array) -> None:
        self._free[self._num_free : self._num_free + len(blocks)] = blocks
        self._num_free += len(blocks)

    def _first_seen(self, num_tokens: int) -> int:
        """The first block that queries after `num_tokens` attend to."""
        return max(num_tokens - self._window + 1, 0) // self.block_size if self._window else 0

    def _free_behind_window(self, row: int, num_tokens: int) -> None:
        """Frees the blocks that no query attends to once `num_tokens` are computed."""
        first, end = int(self._num_freed[row]), self._first_seen(num_tokens)
        blocks = self._block_table[row, first:end]
        if self._parts is not None:
            self._give_back_parts(self._parts.leave(row, first, blocks))
        else:
            self._give_back(blocks)
            self._block_table[row, first:end] = FREED_BLOCK
        self._num_freed[row] = end

    def _use_later(self, blocks: list[int]) -> None:
        """Makes cached blocks of a sequence in use the last to be reused, its first block last of all."""
        for block in reversed(blocks):
            if block >= self.num_blocks:
                self.host_tier.use_later(block)
            elif block in self._cached:
                self._cached.move_to_end(block)

    def _discard(self, block: int) -> None:
        """A block, on the device or in host memory, is no longer registered: it is free unless a row uses it."""
        if block >= self.num_blocks:
            self.host_tier.discard(block)
        elif block in self._cached:
            del self._cached[block]
            self._add_free(np.array([block], np.int32))

    def _discard_part(self, block: int) -> None:
        """The part of an unregistered block is free unless a row needs it."""
        if ~block in self._cached:
            assert self._parts is not None
            del self._cached[~block]
            self._num_cached_parts -= 1
            self._add_free(self._parts.detach(np.array([block], np.int32)))

    def _take(self, row: int, count: int) -> None:
        """Gives a row `count` more blocks and their parts."""
        held, blocks = int(self._held[row]), self._allocate(count)
        self._block_table[row, held : held + count] = blocks
        self._holders[blocks] = 1
        if self._parts is not None:
            parts = self._allocate(count * self._parts.num_groups).reshape(count, -1)
            self._parts.attach(row, held, blocks, parts)
        self._held[row] = held + count

    def _reload(self, host_numbers: list[int]) -> Int32Array:
        """Copies blocks from host memory into new ones, each used by one row."""
        self.host_tier.hold(host_numbers)
        blocks = self._allocate(len(host_numbers))
        self._holders[blocks] = 1
        for number, block in zip(host_numbers, blocks.tolist(), strict=True):
            self.host_tier.reload(number, block)
        return blocks

    def _allocate(self, count: int) -> Int32Array:
        while self._num_free < count:
            self._reuse()
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()

    def _reuse(self) -> None:
        """Frees the least recently used cached entry: a part alone, or a block and its part. If there are host blocks,
        the contents of the block move there."""
        entry = next(iter(self._cached))
        if entry < 0:
            self._discard_part(~entry)
            return
        if self.host_tier.num_blocks:
            self.host_tier.offload(entry)
        else:
            self._prefixes.forget(entry)
        self._discard_part(entry)
        self._discard(entry)


def _num_used(blocks: Int32Array, holders: Int32Array) -> int:
    """How many of these blocks are held by rows. Blocks from len(holders) on are in host memory."""
    return int(np.count_nonzero(holders[blocks[blocks < len(holders)]]))
