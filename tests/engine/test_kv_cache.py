import numpy as np
import pytest

from llmbackend.engine.kv_cache import KVCacheManager
from llmbackend.engine.step import RowTable


def make(num_blocks: int = 8, rows: int = 4, block_size: int = 4) -> tuple[KVCacheManager, RowTable]:
    table = RowTable(rows, 32, block_size)
    return KVCacheManager(num_blocks, table), table


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_reserves_only_the_blocks_that_are_missing() -> None:
    kv_cache, table = make()
    assert kv_cache.reserve(int32(0), int32(5))
    first = table.block_table[0, :2].tolist()
    assert kv_cache.num_free_blocks == 6
    assert kv_cache.reserve(int32(0), int32(8))
    assert kv_cache.num_free_blocks == 6
    assert kv_cache.reserve(int32(0), int32(9))
    assert kv_cache.num_free_blocks == 5
    assert table.block_table[0, :2].tolist() == first
    kv_cache.check()


def test_reserve_is_all_or_nothing() -> None:
    kv_cache, _ = make(num_blocks=4)
    assert not kv_cache.reserve(int32(0, 1), int32(12, 8))
    assert kv_cache.num_free_blocks == 4
    assert kv_cache.reserve(int32(0, 1), int32(8, 8))
    assert kv_cache.num_free_blocks == 0
    kv_cache.check()


def test_rows_never_share_a_block() -> None:
    kv_cache, table = make()
    kv_cache.reserve(int32(0, 1, 2), int32(8, 4, 12))
    held = [*table.block_table[0, :2], *table.block_table[1, :1], *table.block_table[2, :3]]
    assert len(set(held)) == 6


def test_missing_blocks_is_never_negative() -> None:
    kv_cache, _ = make()
    kv_cache.reserve(int32(0), int32(12))
    assert kv_cache.missing_blocks(int32(0, 1), int32(4, 4)).tolist() == [0, 1]


def test_check_notices_a_lost_block() -> None:
    kv_cache, table = make()
    kv_cache.reserve(int32(0), int32(8))
    table.block_table[0, 1] = table.block_table[0, 0]
    with pytest.raises(AssertionError, match="lost or held twice"):
        kv_cache.check()


def test_conservation_over_random_reserves_and_releases() -> None:
    draw = np.random.default_rng(1)
    kv_cache, _ = make(num_blocks=20, rows=6)
    for _ in range(500):
        if draw.random() < 0.4:
            kv_cache.release(int(draw.integers(6)))
        else:
            rows = draw.permutation(6)[: draw.integers(1, 6)].astype(np.int32)
            kv_cache.reserve(rows, draw.integers(1, 32, len(rows)).astype(np.int32))
        kv_cache.check()
    for row in range(6):
        kv_cache.release(row)
    assert kv_cache.num_free_blocks == 20
    kv_cache.check()
