"""The slots for states of recurrent layers: which belong to rows, and which cache the state after a prefix.

Used by the manager of KV blocks: a row has one slot in addition to its blocks. The states themselves are the runner's.
A prefix is named by the identity of its last block (prefix_cache.py), which is never reused. Invariants: each slot is
free, a row's, reserved for a state that the planned step saves, or holds the state after a cached prefix. Of the last
kind the least recently used is evicted first, but none from which a row has yet to start.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from ..step import Int32Array, RowTable

NO_SLOT: Final = -1
GRID_TOKENS: Final = 2048
"""States are saved at multiples of this many tokens, and at the last full block before the end of a prompt."""


class _Copy(NamedTuple):
    """A state that the planned step must save."""

    row: int
    position: int
    slot: int


class StateSlots:
    """The only writer of `table.state_slots`, `state_sources` and `state_copies`. Steps do not overlap."""

    def __init__(self, num_slots: int, table: RowTable) -> None:
        self.num_slots = num_slots
        self._table = table
        self._free = list(range(num_slots - 1, -1, -1))
        self._kept: OrderedDict[int, int] = OrderedDict()
        """Slots by the identity of the prefix's last block; least recently used first."""
        self._begins: dict[int, int] = {}
        """By row: the identity of the prefix from whose state it has yet to start."""
        self._planned: list[_Copy] = []

    @property
    def has_room(self) -> bool:
        """Whether one more row can get a slot."""
        return bool(self._free) or len(self._kept) > len(set(self._begins.values()))

    def keeps(self, identity: int) -> bool:
        """Whether the state after the block with this identity is cached."""
        return identity in self._kept

    def take(self, row: int, identity: int | None) -> None:
        """Gives a row a slot. identity: of the prefix from whose state it starts; None = it starts from zeros."""
        source = NO_SLOT
        if identity is not None:
            source = self._kept[identity]
            self._kept.move_to_end(identity)
            self._begins[row] = identity
        slot = self._allocate()
        if slot == NO_SLOT and identity is not None:  # the last slot: the row takes it over
            del self._kept[identity], self._begins[row]
            slot, source = source, NO_SLOT
        assert slot != NO_SLOT, "a row was admitted without a slot for its state"
        self._table.state_slots[row], self._table.state_sources[row] = slot, source

    def release(self, row: int) -> None:
        """Frees the row's slot. No effect for a row without one."""
        slot = int(self._table.state_slots[row])
        if slot != NO_SLOT:
            self._free.append(slot)
        self._begins.pop(row, None)
        self._table.state_slots[row] = self._table.state_sources[row] = NO_SLOT

    def plan(self, rows: Int32Array, num_tokens: Int32Array, block_size: int) -> None:
        """Plans which states the next step saves. It computes `num_tokens[i]` tokens of each of these rows, which are
        those with shared blocks. Frees slots reserved by an earlier plan whose step did not complete."""
        self._forget_planned()
        begin = self._table.num_computed_tokens[rows]
        end, prompt_end = begin + num_tokens, (self._table.num_prompt_tokens[rows] - 1) // block_size * block_size
        grid = -(-GRID_TOKENS // block_size) * block_size
        on_grid, at_end = end // grid > begin // grid, (begin < prompt_end) & (prompt_end <= end)
        for i in (on_grid | at_end).nonzero()[0].tolist():
            first = (int(begin[i]) // grid + 1) * grid
            positions = {*range(first, int(end[i]) + 1, grid), *([int(prompt_end[i])] if at_end[i] else [])}
            self._plan_row(int(rows[i]), sorted(positions))

    def reached(self, row: int, position: int, identity: int) -> None:
        """The row's block that ends at this position was registered with this identity by the planned step."""
        for copy in self._planned:
            if copy.row == row and copy.position == position and not self.keeps(identity):
                self._kept[identity] = copy.slot
                self._planned.remove(copy)
                return

    def computed(self, rows: Int32Array) -> None:
        """The planned step ran without errors for these rows, and their blocks are registered."""
        self._table.state_sources[rows] = NO_SLOT
        if self._begins:
            for row in rows.tolist():
                self._begins.pop(row, None)
        self._forget_planned()

    def check(self) -> None:
        """Raises AssertionError unless each slot is exactly one of free, a row's and cached."""
        slots = self._table.state_slots
        known = [*self._free, *self._kept.values(), *slots[slots != NO_SLOT].tolist()]
        known += [copy.slot for copy in self._planned]
        if sorted(known) != list(range(self.num_slots)):
            raise AssertionError(f"slots of states are lost or held twice: {len(known)} known of {self.num_slots}")
        if any(identity not in self._kept for identity in self._begins.values()):
            raise AssertionError("a row begins from a state that is not kept any more")

    def _plan_row(self, row: int, positions: list[int]) -> None:
        for position in positions:
            if (slot := self._allocate()) == NO_SLOT:
                return
            self._planned.append(_Copy(row, position, slot))
            self._table.state_copies.setdefault(row, []).append((position, slot))

    def _forget_planned(self) -> None:
        if self._planned:
            self._free += [copy.slot for copy in self._planned]
            self._planned.clear()
        self._table.state_copies.clear()

    def _allocate(self) -> int:
        """A free slot, or that of the least recently used prefix; NO_SLOT = there is none."""
        if self._free:
            return self._free.pop()
        begins = set(self._begins.values())
        identity = next((each for each in self._kept if each not in begins), None)
        return NO_SLOT if identity is None else self._kept.pop(identity)
