import numpy as np
import pytest

from llmbackend.engine.memory.kv_cache import KVCacheManager
from llmbackend.engine.memory.prefix_cache import Salt
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


def test_blocks_to_come_are_those_of_the_known_tokens() -> None:
    kv_cache, table = make()
    table.num_tokens[:2] = 4, 9
    kv_cache.reserve(int32(0), int32(12))
    assert kv_cache.future_blocks(int32(0, 1), 512) == 3


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


# --- texts that come again --------------------------------------------------------------------------------------------


def compute(kv_cache: KVCacheManager, table: RowTable, row: int, tokens: list[int], salt: Salt = ()) -> int:
    """Gives a row the tokens, as the scheduler does, and computes all of them; how many were found."""
    table.token_ids[row, : len(tokens)] = tokens
    table.num_tokens[row] = len(tokens)
    found = kv_cache.take(row, kv_cache.find(table.token_ids[row, : len(tokens)], salt))
    assert kv_cache.reserve(int32(row), int32(len(tokens)))
    table.num_computed_tokens[row] = len(tokens)
    kv_cache.register(int32(row), int32(len(tokens)))
    kv_cache.check()
    return found


def test_rows_share_full_blocks_and_a_shared_one_is_free_when_its_last_holder_goes() -> None:
    kv_cache, table = make()
    assert compute(kv_cache, table, 0, [*range(9)]) == 0
    assert compute(kv_cache, table, 1, [*range(8), 99]) == 8
    assert table.block_table[0, :2].tolist() == table.block_table[1, :2].tolist()
    assert table.block_table[0, 2] != table.block_table[1, 2]
    assert kv_cache.num_free_blocks == 8 - 4
    kv_cache.release(0)
    kv_cache.check()
    assert (kv_cache.num_free_blocks, kv_cache.num_cached_blocks) == (8 - 3, 0)
    kv_cache.release(1)
    kv_cache.check()
    assert (kv_cache.num_free_blocks, kv_cache.num_cached_blocks) == (8, 2)


def test_blocks_that_are_not_full_or_not_computed_are_not_found() -> None:
    kv_cache, table = make()
    table.token_ids[0, :12] = range(12)
    table.num_tokens[0] = 12
    kv_cache.reserve(int32(0), int32(12))
    table.num_computed_tokens[0] = 12
    kv_cache.register(int32(0), int32(7))
    assert len(kv_cache.find(table.token_ids[0, :12], ()).blocks) == 1
    kv_cache.register(int32(0), int32(8))
    assert len(kv_cache.find(table.token_ids[0, :12], ()).blocks) == 2


def test_cached_blocks_are_reused_only_when_no_others_are_left_the_end_of_a_text_first() -> None:
    kv_cache, table = make(num_blocks=4)
    compute(kv_cache, table, 0, [*range(12)])
    blocks = table.block_table[0, :3].tolist()
    kv_cache.release(0)
    kv_cache.reserve(int32(1), int32(4))
    assert table.block_table[1, 0] not in blocks
    kv_cache.reserve(int32(2), int32(8))
    assert set(table.block_table[2, :2].tolist()) == {blocks[2], blocks[1]}
    assert kv_cache.find(np.arange(12, dtype=np.int32), ()).blocks.tolist() == blocks[:1]
    kv_cache.check()


def test_a_pool_without_prefix_caching_finds_nothing() -> None:
    table = RowTable(4, 32, 4)
    kv_cache = KVCacheManager(8, table, enable_prefix_caching=False)
    assert [compute(kv_cache, table, row, [*range(9)]) for row in (0, 1)] == [0, 0]
    kv_cache.release(0)
    assert kv_cache.num_cached_blocks == 0


def test_check_notices_a_wrong_count_of_holders_and_a_block_of_another_text() -> None:
    kv_cache, table = make()
    compute(kv_cache, table, 0, [*range(9)])
    compute(kv_cache, table, 1, [*range(9)])
    table.token_ids[1, 0] = 77
    with pytest.raises(AssertionError, match="with other tokens"):
        kv_cache.check()
    table.block_table[1, 0] = table.block_table[1, 2]
    with pytest.raises(AssertionError, match="holders are wrong"):
        kv_cache.check()


@pytest.mark.parametrize("seed", range(4))
def test_conservation_over_random_texts(seed: int) -> None:
    """Rows come, find, compute, fail and go; what is found is always the row's own text and salt."""
    draw = np.random.default_rng(seed)
    kv_cache, table = make(num_blocks=14, rows=5, block_size=2)
    text_of: dict[int, tuple[Salt, tuple[int, ...]]] = {}
    lives: dict[int, Salt] = {}
    num_found = 0
    for _ in range(600):
        row = int(draw.integers(5))
        if row in lives:
            if draw.random() < 0.2:
                kv_cache.invalidate(row)
            kv_cache.release(row)
            del lives[row]
        else:
            tokens, salt = (draw.integers(0, 2, draw.integers(1, 8))).tolist(), (str(draw.choice(["", "a"])),)
            prefix = kv_cache.find(np.array(tokens, np.int32), salt)
            for index, block in enumerate(prefix.blocks.tolist()):
                assert text_of[block] == (salt, tuple(tokens[: 2 * index + 2]))
            if kv_cache.blocks_to_begin(prefix, len(tokens), 512) > kv_cache.num_free_blocks:
                continue
            num_found += compute(kv_cache, table, row, tokens, salt)
            lives[row] = salt
            for index in range(len(prefix.blocks), len(tokens) // 2):
                text_of[int(table.block_table[row, index])] = (salt, tuple(tokens[: 2 * index + 2]))
        kv_cache.check()
    assert num_found > 100
    for row in lives:
        kv_cache.release(row)
    assert kv_cache.num_free_blocks == 14
    kv_cache.check()


@pytest.mark.parametrize("num_host_blocks", [0, 6])
@pytest.mark.parametrize("seed", range(4))
def test_a_repeated_lookup_gives_what_a_new_one_gives(seed: int, num_host_blocks: int) -> None:
    """Whatever has been registered, reused, moved or forgotten since the last one."""
    draw = np.random.default_rng(seed)
    table = RowTable(5, 32, 2)
    kv_cache = KVCacheManager(14, table, num_host_blocks=num_host_blocks)
    texts = [draw.integers(0, 2, length).astype(np.int32) for length in (1, 5, 6, 7, 7, 7)]
    last = [kv_cache.find(text, ("",)) for text in texts]
    lives: set[int] = set()
    num_repeated = 0
    for _ in range(800):
        row = int(draw.integers(5))
        if row in lives:
            if draw.random() < 0.3:
                kv_cache.invalidate(row)
            kv_cache.release(row)
            lives.remove(row)
        elif kv_cache.num_free_blocks > 8:
            compute(kv_cache, table, row, draw.integers(0, 2, draw.integers(1, 15)).tolist(), ("",))
            lives.add(row)
        for index, text in enumerate(texts):
            found, again = kv_cache.find(text, ("",)), kv_cache.find(text, ("",), "", last[index])
            assert again.blocks.tolist() == found.blocks.tolist()
            assert (again.parent, again.missing) == (found.parent, found.missing)
            num_repeated += again is last[index]
            last[index] = again
    assert 2000 < num_repeated < 4800
