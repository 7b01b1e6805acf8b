"""Drafts in steps that overlap: the device looks them up and accepts them, and the host learns later how many."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.engine.config import EngineConfig, SpeculativeConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import EngineStats, InferRequest
from llmbackend.engine.step import LookupLengths, SampledTokens, look_up
from tests.helpers.mock_devices import FailingDevice, PacedDevice, device_of, devices_closed, make_overlapping
from tests.helpers.mock_engine import Outcomes, expect_oracle, make_request, random_life, random_requests, run_counted
from tests.helpers.mock_oracle import mock_generate
from tests.helpers.repeating_text import repeat_text

EAGER = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1, max_step_tokens=24)
PACES = ("fast", "slow", "drawn")
OPTIONS = list(product([1, 7, 512], [1, 4, 32], [1, 3, 32], [False, True]))[::3]
"""Budget, block size, rows, prefix caching."""


@pytest.fixture(autouse=True)
def repeating(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    repeat_text(monkeypatch)
    with devices_closed():
        yield


def drafting(runner_class: type[PacedDevice] = PacedDevice, **arguments: Any) -> EngineCore:
    return make_overlapping(runner_class, **{"speculative_config": EAGER, **arguments})


def run(core: EngineCore, requests: list[InferRequest], max_model_len: int = 4096) -> EngineStats:
    """What each gives is what it gives alone, and nothing is left behind."""
    outcomes, stats = run_counted(core, requests)
    for request in requests:
        expect_oracle(outcomes[request.request_id], request, max_model_len)
    assert not core._table.num_pending_drafts.any()
    assert stats.num_accepted_tokens <= stats.num_draft_tokens
    return stats


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    shortest=st.integers(1, 3),
    more=st.integers(0, 2),
    count=st.integers(1, 9),
)
def test_a_lookup_is_what_a_search_finds(tokens: list[int], shortest: int, more: int, count: int) -> None:
    found = look_up(np.array(tokens, np.int32), count, LookupLengths(shortest, shortest + more)).tolist()
    source = len(tokens) - 1
    for n in range(shortest, shortest + more + 1):
        ends = [end for end in range(n, len(tokens)) if tokens[end - n : end] == tokens[-n:]]
        source = ends[-1] if ends else source
    assert found == [tokens[source + i % (len(tokens) - source)] for i in range(count)]


@pytest.mark.parametrize("option", range(len(OPTIONS)))
def test_options_do_not_change_results(option: int) -> None:
    budget, block_size, max_num_seqs, caching = OPTIONS[option]
    core = drafting(
        pace=PACES[option % 3],
        in_flight=1 + option % 4,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=80,
        enable_prefix_caching=caching,
    )
    stats = run(core, random_requests(seed=5 + option % 3, count=6, max_tokens=60), max_model_len=80)
    assert (stats.num_accepted_tokens > 0) == (budget > 1)
    assert stats.num_accepted_tokens < stats.num_draft_tokens or budget == 1


@pytest.mark.parametrize("pace", PACES)
def test_a_small_pool_forces_preemption_and_the_tokens_stay(pace: str) -> None:
    core = drafting(pace=pace, block_size=4, num_kv_blocks=24, max_num_seqs=12, max_num_batched_tokens=32)
    stats = run(core, random_requests(seed=6, count=20, max_tokens=60))
    assert stats.num_preemptions > 5
    assert stats.num_accepted_tokens > 0


def test_the_next_step_with_drafts_is_launched_before_the_last_one_is_read() -> None:
    """And there are fewer steps than tokens, because drafts hold."""
    request = make_request("r", (1, 2, 3), max_tokens=200, ignore_eos=True)
    core = drafting(in_flight=2)
    core.add(request)
    depths, outcomes = [], Outcomes()
    while core.has_work:
        stats = outcomes.add(core.step()).stats
        depths.append(len(core._in_flight))
    expect_oracle(outcomes["r"], request)
    assert depths.count(1) > len(depths) - 8  # near its end a row waits until it is known how long it is
    assert device_of(core).num_launches < 150
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_texts_that_do_not_repeat_are_looked_up_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """By few drafts: one of all texts in two steps, beside the first tries."""
    monkeypatch.undo()
    requests = [make_request(f"r{i}", (i, 2, 3), max_tokens=200, ignore_eos=True) for i in range(4)]
    stats = run(drafting(speculative_config=SpeculativeConfig(max_step_tokens=16)), requests)
    assert stats.num_steps <= 210
    assert 50 < stats.num_draft_tokens < 250


def test_a_request_ends_where_it_would_alone() -> None:
    """By length, by a stop token among accepted drafts, and at the model's limit."""
    plain = [make_request(f"l{n}", (7,), max_tokens=n, ignore_eos=True) for n in range(1, 25)]
    text = mock_generate(plain[-1]).token_ids
    stops = [make_request(f"s{i}", (7,), max_tokens=40, stop_token_ids=(text[i],), min_tokens=i) for i in range(20)]
    long = [make_request("m", range(20), max_tokens=200, ignore_eos=True)]
    run(drafting(max_model_len=64, max_num_seqs=7), plain + stops + long, max_model_len=64)


def test_only_accepted_tokens_are_found_in_the_prefix_cache() -> None:
    core = drafting(block_size=4, num_kv_blocks=64, in_flight=3)
    request = make_request("first", range(7), max_tokens=60, ignore_eos=True)
    known = (*request.prompt_token_ids, *mock_generate(request).token_ids)
    core.add(request)
    for _ in range(14):
        core.step()
        core.check()
        texts = [core._kv_cache._prefixes.tokens_of(block) for block in range(64)]
        for tokens in (np.frombuffer(text, np.int32).tolist() for text in texts if text is not None):
            assert any(tokens == list(known[i : i + 4]) for i in range(0, len(known), 4))
    core.abort("first")


@pytest.mark.parametrize("seed", range(4))
def test_a_random_life(seed: int) -> None:
    """Requests that begin alike come and go while launches fail and rows break; nothing is lost."""
    draw = np.random.default_rng(seed)
    core = drafting(
        FailingDevice,
        pace="drawn",
        in_flight=2 + seed % 2,
        block_size=4,
        num_kv_blocks=26,
        max_num_seqs=6,
        max_num_batched_tokens=24,
    )
    wanted = [
        msgspec.structs.replace(
            request, prompt_token_ids=(*range(int(draw.choice([0, 4, 9]))), *request.prompt_token_ids)
        )
        for request in random_requests(seed=seed, count=40)
    ]
    requests = {request.request_id: request for request in wanted}
    device_of(core).not_numbers = {"r7", "r8"}
    device_of(core).poisonous = {"r9"}
    outcomes, _ = random_life(core, draw, wanted, lambda: setattr(device_of(core), "failures_left", 1))
    assert device_of(core).num_rows == 0
    for name, request in requests.items():
        outcome, expected = outcomes[name], mock_generate(request)
        assert outcome.token_ids == expected.token_ids[: len(outcome.token_ids)]
        if outcome.finish_reason not in ("abort", "error"):
            assert (outcome.token_ids, outcome.finish_reason) == (expected.token_ids, expected.finish_reason)
            assert outcome.logprobs == expected.logprobs


def test_bad_words_are_kept_and_have_no_drafts() -> None:
    text = mock_generate(make_request("r", (7,), max_tokens=30, ignore_eos=True)).token_ids
    request = make_request("r", (7,), max_tokens=60, ignore_eos=True, bad_words=(text[2:4],))
    assert run(drafting(), [request]).num_draft_tokens == 0


class SaysNothing(PacedDevice):
    def collect(self) -> tuple[int, SampledTokens]:
        step_id, sampled = super().collect()
        return step_id, SampledTokens(sampled.token_ids)


def test_a_runner_that_does_not_say_what_it_accepted_ends_the_engine() -> None:
    core = drafting(SaysNothing)
    core.add(make_request("r", (1, 1, 1), max_tokens=20, ignore_eos=True))
    with pytest.raises(RuntimeError, match="does not say which drafts of 1 rows are accepted"):
        for _ in range(9):
            core.step()


class WithoutDrafts(PacedDevice):
    launches_drafts = False


def test_steps_do_not_overlap_where_the_runner_cannot_look_up_drafts() -> None:
    core = drafting(WithoutDrafts)
    stats = run(core, [make_request("r", (1, 2, 3), max_tokens=60, ignore_eos=True)])
    assert device_of(core).num_launches == 0
    assert stats.num_accepted_tokens > 0


def test_overlap_may_be_asked_for_beside_speculation() -> None:
    assert EngineConfig(model="mock", async_scheduling=True, speculative_config=EAGER).may_overlap
