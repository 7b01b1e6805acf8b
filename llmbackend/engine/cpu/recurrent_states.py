"""Tracks, between steps, how many tokens of a row each state slot has seen.

Used by the native runner: its program changes states in place, so a step cannot simply be repeated. Invariant: a row's
tokens are computed from the state after exactly the tokens before them; if that state was lost, because a step failed
or computed rejected drafts, `lost` names the row.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import msgspec
import numpy as np

from ..config import EngineConfig
from ..kv_groups import KVGroups
from ..step import FlatStep, Int32Array, RowTable, StepPlan, flatten
from .native_memory import DEFAULT_KV_BYTES
from .recurrent_operations import StepStates

_UNKNOWN = -1
_NONE = -1


def num_state_slots(config: EngineConfig, state_bytes: int, num_blocks: int) -> int:
    """Number of slots of `state_bytes`: for running sequences, in at most the memory that KV blocks may take, and for
    cached prefixes, in half of that. Raises ValueError if not even one fits."""
    memory_bytes = config.kv_cache_memory_bytes or DEFAULT_KV_BYTES
    if memory_bytes < state_bytes:
        raise ValueError(
            f"engine argument 'kv_cache_memory_bytes' is {memory_bytes}, expected at least {state_bytes}, the state of "
            "one sequence in recurrent layers"
        )
    kept = min(memory_bytes // 2 // state_bytes, num_blocks)
    return min(config.max_num_seqs, memory_bytes // state_bytes) + kept


def groups_with_draft_replay(groups: KVGroups, config: EngineConfig) -> KVGroups:
    """Extends windows by the positions that are seen when accepted drafts are computed once more."""
    if config.speculative_config is None or not groups.num_windowed:
        return groups
    return msgspec.structs.replace(groups, window=groups.window + config.speculative_config.num_speculative_tokens)


class SlotContents:
    def __init__(self, num_slots: int, num_backups: int = 0) -> None:
        """num_backups: extra slots, owned by the runner, for the states of rows before their drafts."""
        self._num_tokens = np.full(num_slots + num_backups, _UNKNOWN, np.int64)
        self._free_backups = list(range(num_slots, num_slots + num_backups))
        self._backups: dict[int, int] = {}
        """By row."""

    def num_tokens_to_replay(self, step: FlatStep, table: RowTable) -> Int32Array | None:
        """How many tokens before the step's own each row has to recompute, from its state before partly rejected
        drafts; None = none."""
        found = np.zeros(len(step.rows), np.int32)
        for index, row in enumerate(step.rows.tolist() if self._backups else ()):
            backup, begin = self._backups.get(row, _NONE), int(step.seq_lens[index] - step.query_lens[index])
            is_there = table.state_sources[row] == _NONE and self._num_tokens[table.state_slots[row]] == begin
            if backup != _NONE and begin and not is_there and 0 < self._num_tokens[backup] <= begin:
                found[index] = begin - self._num_tokens[backup]
        return found if found.any() else None

    def lost(self, step: FlatStep, table: RowTable) -> list[int]:
        """The rows of the step for which no slot has the state before the step's tokens."""
        slots, sources = table.state_slots[step.rows], table.state_sources[step.rows]
        begins = step.seq_lens - step.query_lens
        is_lost = (begins > 0) & (self._num_tokens[np.where(sources == _NONE, slots, sources)] != begins)
        is_lost &= self._num_tokens[self._backups_of(step, slots)] != begins
        rows: list[int] = step.rows[is_lost].tolist()
        return rows

    def begin_recompute(self, step: FlatStep, table: RowTable) -> StepStates:
        """As `begin`, for a step whose rows are recomputed from their first token."""
        slots = table.state_slots[step.rows]
        sources = np.where(step.seq_lens == step.query_lens, _NONE, slots).astype(np.int32)
        return self._written(StepStates(slots, sources, np.full(len(step.token_ids), _NONE, np.int32)))

    def begin(self, step: FlatStep, table: RowTable, num_drafts: Int32Array | None = None) -> StepStates:
        """Where the step finds states and where it leaves them; lost rows must be in their own slots again. Until
        `end`, the contents of written slots are unknown. num_drafts: the last tokens of each row."""
        copies = np.full(len(step.token_ids), _NONE, np.int32)
        for index, row in enumerate(step.rows.tolist() if table.state_copies else ()):
            for position, slot in table.state_copies.get(row, ()):
                token = int(step.query_start[index + 1] - step.seq_lens[index]) + position - 1
                if step.query_start[index] <= token < step.query_start[index + 1]:
                    copies[token] = slot
        sources = self._sources(step, table)
        for row in step.rows.tolist() if self._backups else ():
            self.forget(row)
        if num_drafts is not None:
            self._back_up(step, num_drafts, sources, copies)
        return self._written(StepStates(table.state_slots[step.rows], sources, copies))

    def end(self, step: FlatStep, states: StepStates) -> None:
        self._num_tokens[states.slots] = step.seq_lens
        is_copied = states.copies != _NONE
        self._num_tokens[states.copies[is_copied]] = step.positions[is_copied] + 1

    def forget(self, row: int) -> None:
        """The row's request has ended, or its backup is no longer useful."""
        if (backup := self._backups.pop(row, _NONE)) != _NONE:
            self._free_backups.append(backup)

    def _back_up(self, step: FlatStep, num_drafts: Int32Array, sources: Int32Array, copies: Int32Array) -> None:
        """Makes the step save the states before drafts, as far as there are slots that it does not start from."""
        for index in num_drafts.nonzero()[0].tolist():
            token = int(step.query_start[index + 1] - num_drafts[index]) - 1
            slot = next((each for each in self._free_backups if each not in sources), _NONE)
            if slot != _NONE and copies[token] == _NONE:
                copies[token] = slot
                self._free_backups.remove(slot)
                self._backups[int(step.rows[index])] = slot

    def _written(self, states: StepStates) -> StepStates:
        """Marks slots about to be written."""
        self._num_tokens[states.slots] = _UNKNOWN
        self._num_tokens[states.copies[states.copies != _NONE]] = _UNKNOWN
        return states

    def _sources(self, step: FlatStep, table: RowTable) -> Int32Array:
        slots, sources = table.state_slots[step.rows], table.state_sources[step.rows]
        begins = step.seq_lens - step.query_lens
        own = np.where(self._num_tokens[slots] == begins, slots, self._backups_of(step, slots))
        from_source = (sources != _NONE) & (self._num_tokens[sources] == begins)
        found: Int32Array = np.where(begins == 0, _NONE, np.where(from_source, sources, own)).astype(np.int32)
        return found

    def _backups_of(self, step: FlatStep, slots: Int32Array) -> Int32Array:
        """Backup slot of each row; its own slot if it has none."""
        if not self._backups:
            return slots
        backups = (self._backups.get(row, slot) for row, slot in zip(step.rows.tolist(), slots.tolist(), strict=True))
        return np.fromiter(backups, np.int32, len(slots))


def flatten_from(plan: StepPlan, table: RowTable, behind: Int32Array) -> FlatStep:
    """The plan's step, preceded by this many already computed tokens of each row."""
    longer = replace(plan, num_scheduled_tokens=plan.num_scheduled_tokens + behind)
    return _flatten_at(longer, table, table.num_computed_tokens[plan.rows] - behind)


def part_of_row(table: RowTable, row: int, begin: int, end: int) -> FlatStep:
    """A step that computes a row's tokens begin..end-1 and samples nothing."""
    if (table.block_tables[:, row, : -(-end // table.block_size)] < 0).any():
        raise RuntimeError("a state is lost, and so are keys and values with which it could be computed again")
    plan = StepPlan(np.array([row], np.int32), np.array([end - begin], np.int32), np.zeros(1, np.bool_))
    return _flatten_at(plan, table, begin)


def _flatten_at(plan: StepPlan, table: RowTable, num_computed_tokens: Int32Array | int) -> FlatStep:
    """The plan's step if its rows had computed this many tokens."""
    earlier = copy.copy(table)
    earlier.num_computed_tokens = table.num_computed_tokens.copy()
    earlier.num_computed_tokens[plan.rows] = num_computed_tokens
    return flatten(plan, earlier)
