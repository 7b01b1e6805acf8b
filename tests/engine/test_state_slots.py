"""Slots of recurrent states beside KV blocks: who has which, and which prefixes can be begun from."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmbackend.engine.memory.kv_cache import KVCacheManager
from llmbackend.engine.memory.state_slots import GRID_TOKENS
from llmbackend.engine.step import RowTable

BLOCK = 4


def make(num_slots: int, rows: int = 3, num_blocks: int = 24, length: int = 40) -> tuple[KVCacheManager, RowTable]:
    table = RowTable(rows, length, BLOCK)
    return KVCacheManager(num_blocks, table, num_state_slots=num_slots), table


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def begin(kv_cache: KVCacheManager, table: RowTable, row: int, tokens: list[int]) -> int:
    """A row with this prompt; how many of its tokens are not computed."""
    table.token_ids[row, : len(tokens)] = tokens
    table.num_tokens[row] = table.num_prompt_tokens[row] = len(tokens)
    prefix = kv_cache.usable(kv_cache.find(table.token_ids[row, : len(tokens)], ("",)))
    table.num_computed_tokens[row] = kv_cache.take(row, prefix)
    return int(table.num_computed_tokens[row])


def compute(kv_cache: KVCacheManager, table: RowTable, row: int, count: int) -> list[tuple[int, int]]:
    """A step; which states it kept."""
    reach = table.num_computed_tokens[row] + count
    assert kv_cache.reserve(int32(row), int32(reach))
    kv_cache.plan(int32(row), int32(count))
    copies = table.state_copies.get(row, [])
    table.num_computed_tokens[row] = reach
    kv_cache.register(int32(row), int32(reach))
    kv_cache.check()
    return copies


def test_the_state_before_the_end_of_a_prompt_is_kept() -> None:
    kv_cache, table = make(4)
    assert begin(kv_cache, table, 0, list(range(14))) == 0
    assert table.state_sources[0] == -1
    assert compute(kv_cache, table, 0, 9) == []
    (kept,) = compute(kv_cache, table, 0, 5)
    assert kept[0] == 12
    kv_cache.release(0)
    kv_cache.check()
    # A text that goes on begins there; one that ends earlier, or goes on otherwise before, at its start.
    assert begin(kv_cache, table, 1, [*range(13), 99]) == 12
    assert table.state_sources[1] == kept[1] != table.state_slots[1]
    assert begin(kv_cache, table, 2, list(range(12))) == 0
    assert table.state_sources[2] == -1


def test_states_are_kept_on_a_grid() -> None:
    kv_cache, table = make(8, rows=1, num_blocks=3000, length=3 * GRID_TOKENS)
    tokens = [i % 100 for i in range(2 * GRID_TOKENS + 100)]
    begin(kv_cache, table, 0, tokens)
    positions = [position for position, _ in compute(kv_cache, table, 0, len(tokens))]
    assert positions == [GRID_TOKENS, 2 * GRID_TOKENS, 2 * GRID_TOKENS + 96]


def test_a_planned_state_whose_step_failed_is_forgotten() -> None:
    kv_cache, table = make(3)
    begin(kv_cache, table, 0, list(range(14)))
    kv_cache.reserve(int32(0), int32(14))
    for _ in range(5):
        kv_cache.plan(int32(0), int32(14))
        assert len(table.state_copies[0]) == 1
        kv_cache.check()
    kv_cache.release(0)
    kv_cache.plan(int32(), int32())
    assert not table.state_copies
    assert begin(kv_cache, table, 1, list(range(14))) == 0


def test_kept_states_give_way_to_rows_the_least_recently_used_first() -> None:
    kv_cache, table = make(2, rows=2)
    begin(kv_cache, table, 0, list(range(14)))
    compute(kv_cache, table, 0, 14)
    kv_cache.release(0)
    assert begin(kv_cache, table, 0, [*range(14), 7]) == 12  # the row goes on with what was kept beside it
    assert kv_cache.has_state_slot is False
    compute(kv_cache, table, 0, 3)
    assert kv_cache.has_state_slot
    assert begin(kv_cache, table, 1, [50] * 14) == 0
    assert not kv_cache.has_state_slot
    kv_cache.check()


def test_the_last_slot_is_begun_from_in_place() -> None:
    kv_cache, table = make(1, rows=1)
    begin(kv_cache, table, 0, list(range(14)))
    assert compute(kv_cache, table, 0, 14) == []  # no slot for a copy
    kv_cache.release(0)
    kv_cache, table = make(2, rows=3)
    begin(kv_cache, table, 0, list(range(14)))
    compute(kv_cache, table, 0, 14)
    assert begin(kv_cache, table, 1, [*range(14), 7]) == 12
    assert table.state_sources[1] == -1
    kv_cache.check()


def test_check_notices_a_lost_slot() -> None:
    kv_cache, table = make(3)
    begin(kv_cache, table, 0, list(range(14)))
    table.state_slots[0] = (table.state_slots[0] + 1) % 3
    with pytest.raises(AssertionError, match="slots of states are lost or held twice"):
        kv_cache.check()


def test_no_history_loses_a_slot_or_begins_from_another_text() -> None:
    """Random rows, steps, failures and ends. What each slot has seen is written down as the runner would know it."""
    chance = random.Random(5)
    kv_cache, table = make(5, rows=4, num_blocks=26)
    seen: dict[int, tuple[int, ...]] = {}
    live: set[int] = set()
    num_hits = 0
    for _ in range(8000):
        row = chance.randrange(4)
        if row not in live:
            if not kv_cache.has_state_slot or kv_cache.num_free_blocks < 10:
                continue
            tokens = [chance.randrange(2)] * chance.randrange(5, 17) + [7] * chance.randrange(8)
            num_hit = begin(kv_cache, table, row, tokens)
            num_hits += num_hit > 0
            source = int(table.state_sources[row])
            source = int(table.state_slots[row]) if source < 0 else source
            assert not num_hit or seen[source] == tuple(tokens[:num_hit])
            live.add(row)
        elif chance.random() < 0.2:
            kv_cache.release(row)
            live.remove(row)
        elif left := int(table.num_tokens[row] - table.num_computed_tokens[row]):
            count = chance.randint(1, left)
            begins, text_of = int(table.num_computed_tokens[row]), tuple(table.token_ids[row].tolist())
            reach = int32(begins + count)
            kv_cache.reserve(int32(row), reach)
            kv_cache.plan(int32(row), int32(count))
            if chance.random() < 0.2:
                continue
            for position, slot in table.state_copies.get(row, ()):
                seen[slot] = text_of[:position]
            seen[int(table.state_slots[row])] = text_of[: begins + count]
            table.num_computed_tokens[row] = reach[0]
            kv_cache.register(int32(row), reach)
        kv_cache.check()
    assert num_hits > 50
