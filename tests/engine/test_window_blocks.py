"""Where all layers have a window, rows give blocks back while they go on, and no query misses a key."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from llmbackend.engine.kv_groups import KVGroups, layer_groups
from llmbackend.engine.memory.kv_cache import KVCacheManager
from llmbackend.engine.memory.window_parts import FREED_BLOCK
from llmbackend.engine.step import Int32Array, RowTable

ROWS, LENGTH, MOST_CHUNK = 4, 48, 5
Text = tuple[int, ...]


def int32(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def test_blocks_behind_the_window_are_free_and_can_be_found() -> None:
    table = RowTable(2, 32, 4)
    kv_cache = KVCacheManager(8, table, groups=KVGroups(0, 1, 5))
    table.token_ids[:] = np.arange(32)
    kv_cache.reserve(int32(0), int32(20))
    kv_cache.register(int32(0), int32(11))  # the next query, at 11, sees 7 to 11
    assert (kv_cache.num_free_blocks, kv_cache.num_cached_blocks) == (4, 1)
    assert table.block_table[0, 0] == FREED_BLOCK != table.block_table[0, 1]
    kv_cache.register(int32(0), int32(12))
    assert kv_cache.num_free_blocks == 5
    prefix = kv_cache.find(table.token_ids[1], ())
    assert len(prefix.blocks) == 3
    assert kv_cache.take(1, prefix) == 12
    assert kv_cache.num_free_blocks == 5  # two of them stay free, and the third is the other row's
    kv_cache.check()
    for row in (0, 1):
        kv_cache.release(row)
    assert kv_cache.num_free_blocks == 8


def test_a_text_that_failed_is_not_found_by_the_blocks_that_were_free_already() -> None:
    table = RowTable(2, 32, 4)
    kv_cache = KVCacheManager(8, table, groups=KVGroups(0, 1, 5))
    table.token_ids[:] = np.arange(32)
    kv_cache.reserve(int32(0), int32(20))
    kv_cache.register(int32(0), int32(18))
    kv_cache.invalidate(0)
    kv_cache.release(0)
    assert kv_cache.find(table.token_ids[1], ()).blocks.tolist() == []
    assert (kv_cache.num_free_blocks, kv_cache.num_cached_blocks) == (8, 0)
    kv_cache.check()


def test_one_layer_that_sees_all_keeps_all() -> None:
    assert layer_groups([4, 9, 4], 100, True).groups == KVGroups(0, 1, 9)
    assert layer_groups([4, 0], 100, are_alike=False).groups == KVGroups()


@dataclass
class Simulation:
    """Rows that advance by chunks as in an engine with up to two steps in flight; each slot knows the text whose key it
    holds."""

    groups: KVGroups
    block_size: int
    num_blocks: int
    caching: bool
    num_host_blocks: int
    draw: np.random.Generator
    launched: deque[tuple[Int32Array, Int32Array]] = field(default_factory=deque)
    computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = RowTable(ROWS, LENGTH, self.block_size, self.groups.count)
        self.kv_cache = KVCacheManager(self.num_blocks, self.table, self.caching, self.num_host_blocks, self.groups)
        self.slots: list[Text] = [()] * (self.num_blocks * self.block_size)
        self.host_slots: list[Text] = [()] * (self.num_host_blocks * self.block_size)
        self.num_hits = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.begin_rows()
            self.launch()
            while len(self.launched) > self.draw.integers(3):
                self.commit()
            self.kv_cache.check()
        while self.launched:
            self.commit()
        for row in list(self.computed):
            self.end(row)
        assert self.kv_cache.num_free_blocks == self.num_blocks

    def begin_rows(self) -> None:
        for row in range(ROWS):
            if row not in self.computed and self.draw.random() < 0.5:
                self.table.token_ids[row] = np.arange(LENGTH) + 100 * self.draw.integers(2)
                self.table.token_ids[row, self.draw.integers(LENGTH) :] += 1000 * self.draw.integers(2)
                prefix = self.kv_cache.usable(self.kv_cache.find(self.table.token_ids[row], ()))
                if self.kv_cache.blocks_to_begin(prefix, LENGTH, MOST_CHUNK) <= self.kv_cache.num_free_blocks:
                    self.computed[row] = self.kv_cache.take(row, prefix)
                    self.num_hits += len(prefix.blocks) > 0

    def launch(self) -> None:
        rows, reaches = [], []
        for row, at in list(self.computed.items()):
            reach = min(at + int(self.draw.integers(1, MOST_CHUNK + 1)), LENGTH)
            if reach == at or not self.kv_cache.reserve(int32(row), int32(reach)):
                self.end(row, failed=self.draw.random() < 0.2)
                continue
            rows.append(row)
            reaches.append(reach)
        self.copy()
        for row, reach in zip(rows, reaches, strict=True):
            for group in range(self.groups.count):
                window = LENGTH if group < self.groups.num_full else self.groups.window
                for position in range(self.computed[row], reach):
                    self.slots[self.slot(group, row, position)] = self.text(row, position)
                    for seen in range(max(0, position - window + 1), position + 1):
                        assert self.slots[self.slot(group, row, seen)] == self.text(row, seen)
            self.computed[row] = reach
        self.launched.append((int32(*rows), int32(*reaches)))

    def commit(self) -> None:
        rows, reaches = self.launched.popleft()
        self.kv_cache.register(rows, reaches)
        if not self.launched:
            states, holders, rows = self.kv_cache.contents()
            assert np.count_nonzero(states == 2) == self.num_blocks - self.kv_cache.num_free_blocks
            assert np.count_nonzero(states == 1) == self.kv_cache.num_cached_blocks
            assert ((states == 2) == (holders > 0)).all() and ((rows >= 0) == (holders > 0)).all()
            most = [self.groups.max_blocks(reach, 1, self.block_size) for reach in self.computed.values()]
            assert int(holders.sum()) <= sum(most)

    def end(self, row: int, failed: bool = False) -> None:
        """A preemption, or the end."""
        if failed:
            self.kv_cache.invalidate(row)
        self.kv_cache.release(row)
        del self.computed[row]
        self.launched = deque((rows[rows != row], reaches[rows != row]) for rows, reaches in self.launched)

    def copy(self) -> None:
        size = self.block_size
        for copies in self.kv_cache.host_tier.take_copies():
            pairs = list(zip(copies.blocks.tolist(), copies.host_blocks.tolist(), strict=True))
            for block, host_block in pairs:
                here, there = slice(block * size, (block + 1) * size), slice(host_block * size, (host_block + 1) * size)
                if copies.to_host:
                    self.host_slots[there] = self.slots[here]
                else:
                    self.slots[here] = self.host_slots[there]

    def slot(self, group: int, row: int, position: int) -> int:
        block = int(self.table.block_tables[group, row, position // self.block_size])
        assert block != FREED_BLOCK
        return block * self.block_size + position % self.block_size

    def text(self, row: int, position: int) -> Text:
        return tuple(self.table.token_ids[row, : position + 1].tolist())


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("num_full", "num_windowed"), [(0, 1), (1, 1), (1, 3)])
def test_no_query_misses_a_key_and_memory_is_bounded(num_full: int, num_windowed: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    simulation = Simulation(
        groups=KVGroups(num_full, num_windowed, int(draw.integers(1, 14))),
        block_size=int(draw.integers(1, 5)),
        num_blocks=int(draw.integers(24, 50)) * (num_full + num_windowed),
        caching=seed % 3 > 0,
        num_host_blocks=0 if num_full else [0, 0, 20][seed % 3],
        draw=draw,
    )
    simulation.run(60)
    assert (simulation.num_hits > 0) == simulation.caching
