"""Requests that are longer than the KV memory, where their layers see a window."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.kv_groups import KVGroups
from llmbackend.engine.messages import InferRequest
from tests.helpers.mock_engine import Outcomes, expect_oracle, make_core, make_request, run_to_end
from tests.helpers.windowed_mock import windowed_core

WINDOW = KVGroups(0, 1, 10)
MIXED = KVGroups(1, 2, 10)


@pytest.mark.parametrize("block_size", [1, 4, 7])
@pytest.mark.parametrize("groups", [KVGroups(), WINDOW, KVGroups(1, 2, 10), KVGroups(1, 3, 1)])
def test_the_numbers_agree(groups: KVGroups, block_size: int) -> None:
    """The longest request, the largest chunk and the most blocks say the same, and no row ever holds more."""
    for num_blocks in range(40):
        longest = groups.max_request_tokens(block_size, num_blocks)
        for num_tokens in range(1, 100):
            most = groups.max_chunk(num_tokens, block_size, num_blocks)
            assert (most > 0) == (num_tokens <= longest)
            for chunk in range(1, 30):
                fits = groups.max_blocks(num_tokens, chunk, block_size) <= num_blocks
                assert fits == (min(chunk, num_tokens) <= most)
    for computed in range(60):
        for chunk in range(1, 20):
            seen = range(max(computed - groups.window + 1, 0) // block_size, -(-(computed + chunk) // block_size))
            assert not groups.num_windowed or len(seen) <= groups.max_windowed_blocks(chunk, block_size)


def test_any_length_fits_behind_a_window() -> None:
    assert WINDOW.max_request_tokens(4, 4) == sys.maxsize
    assert WINDOW.max_request_tokens(4, 3) == 12


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [5, 64])
def test_requests_that_outgrew_the_memory_are_preempted_and_go_on(caching: bool, budget: int) -> None:
    core = windowed_core(
        WINDOW, block_size=4, num_kv_blocks=13, max_num_seqs=6, max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )  # fmt: skip
    long = [make_request(f"l{i}", range(i, i + 20), 1, max_tokens=90, ignore_eos=True) for i in range(3)]
    short = [make_request(f"s{i}", (i,), 0, max_tokens=30, ignore_eos=True) for i in range(3)]
    outcomes = Outcomes()
    for request in long:
        core.add(request)
    while min(len(outcomes[request.request_id].token_ids) for request in long) < 40:
        outcomes.add(core.step())
        core.check()
    outgrown = {one.request.request_id for one in core._live.values() if core._table.num_tokens[one.row] > 4 * 13}
    preempted: set[str] = set()
    for request in short:
        core.add(request)
    while core.has_work:
        outcomes.add(core.step())
        core.check()
        preempted |= {one.request.request_id for one in core._scheduler.preempted}
    for request in (*long, *short):
        expect_oracle(outcomes[request.request_id], request)
    assert preempted & outgrown
    assert core._kv_cache.num_free_blocks == 13


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("seed", range(2))
def test_where_some_layers_see_all_tokens_and_bounds_stay(seed: int, budget: int) -> None:
    """Prompts that begin alike, preemptions, and requests that take up others' outputs."""
    draw = np.random.default_rng(seed)
    texts = draw.integers(0, 200, (2, 60))
    block_size = int(draw.integers(2, 6))
    core = windowed_core(
        MIXED, block_size=block_size, num_kv_blocks=200 // block_size, max_num_seqs=5, max_num_batched_tokens=budget
    )
    outcomes = Outcomes()
    requests: list[InferRequest] = []
    for i in range(16):
        length, tail = draw.integers(0, 60), draw.integers(0, 200, draw.integers(1, 20))
        prompt = [*texts[draw.integers(2)][:length].tolist(), *tail.tolist()]
        if i > 8 and i % 3 == 0:
            earlier = requests[i - 8]
            prompt = [*earlier.prompt_token_ids, *outcomes[earlier.request_id].token_ids, *tail.tolist()]
        request = make_request(f"r{i}", prompt[:90], max_tokens=int(draw.integers(20, 50)), ignore_eos=True)
        requests.append(request)
        core.add(request)
        for _ in range(int(draw.integers(6))):
            if core.has_work:
                stats = outcomes.add(core.step()).stats
                core.check()
                expect_bounded(core, budget)
    while core.has_work:
        stats = outcomes.add(core.step()).stats
        core.check()
        expect_bounded(core, budget)
    for request in requests:
        expect_oracle(outcomes[request.request_id], request)
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 40


def expect_bounded(core: EngineCore, budget: int) -> None:
    """No more blocks are held than the formula says."""
    groups, block_size = core.info.kv_groups, core.info.block_size
    rows = [sequence.row for sequence in core._scheduler._running]
    most = [groups.max_blocks(int(core._table.num_tokens[row]), budget, block_size) for row in rows]
    assert core.info.num_blocks - core._kv_cache.num_free_blocks <= sum(most)


def test_a_long_request_holds_windowed_blocks_of_its_window_alone() -> None:
    core = windowed_core(MIXED, block_size=4, num_kv_blocks=200, max_num_batched_tokens=8)
    core.add(make_request("r", range(100), max_tokens=90, ignore_eos=True))
    held = 0
    while core.has_work:
        core.step()
        held = max(held, 200 - core._kv_cache.num_free_blocks)
    assert 48 < held <= MIXED.max_blocks(190, 1, 4) < 3 * 48


def test_a_text_whose_windowed_blocks_were_reused_is_found_again_after_it_was_computed_once_more() -> None:
    core = windowed_core(MIXED, block_size=4, num_kv_blocks=40, max_num_batched_tokens=16)
    hits = [0]
    for i, prompt in enumerate([range(40), range(40), range(100, 160), range(40), range(40)]):
        core.add(make_request(f"r{i}", prompt, max_tokens=1))
        while core.has_work:
            stats = core.step().stats
            core.check()
        hits.append(stats.prefix_cache_hits)
    first, second, other, third, fourth = np.diff(hits).tolist()
    assert (first, second, other, fourth) == (0, 36, 0, 36)
    assert third < 36


@pytest.mark.parametrize("num_blocks", [4, 5, 9])
def test_a_prompt_longer_than_the_memory_is_computed_in_chunks_that_fit(num_blocks: int) -> None:
    request = make_request("r", range(100), max_tokens=20, ignore_eos=True)
    core = windowed_core(WINDOW, block_size=4, num_kv_blocks=num_blocks, max_num_batched_tokens=512)
    expect_oracle(run_to_end(core, [request])["r"], request)


def test_a_request_goes_on_in_another_engine_after_it_outgrew_the_memory() -> None:
    request = make_request("r", range(20), max_tokens=90, ignore_eos=True)
    arguments: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 6, "max_num_batched_tokens": 64}
    core, outcomes = windowed_core(WINDOW, **arguments), Outcomes()
    core.add(request)
    while len(outcomes["r"].token_ids) < 60:
        outcomes.add(core.step())
    resumed = msgspec.structs.replace(request, output_token_ids=outcomes["r"].token_ids)
    expect_oracle(run_to_end(windowed_core(WINDOW, **arguments), [resumed])["r"], resumed)


def test_what_never_fits_is_refused_by_name() -> None:
    request = make_request("r", range(20), max_tokens=90)
    core = windowed_core(WINDOW, block_size=4, num_kv_blocks=3)
    assert core.info.max_request_tokens == 12
    assert MIXED.max_request_tokens(4, 20) == 48
    assert "have 20 tokens, expected at most 12" in run_to_end(core, [request])["r"].error
    core = make_core(block_size=4, num_kv_blocks=3)
    assert core.info.max_request_tokens == 12
