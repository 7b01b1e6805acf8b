"""Requests that begin alike: what is computed once, what is found again, and that no token changes by it.

The mock model reads a request's tokens back from its KV slots, so that a block found for another text would change the
tokens; `expect_oracle` compares them with those that the request gives alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.memory.prefix_cache import PrefixCache
from llmbackend.engine.messages import EngineInput, InferRequest, SamplingParams, StepOutput
from llmbackend.engine.scheduling.scheduler import MAX_OVERTAKEN
from llmbackend.engine.step import RowTable, SampledTokens, StepPlan
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.mock_engine import (
    FaultyRunner,
    Outcomes,
    expect_oracle,
    make_core,
    make_request,
    run_counted,
    run_to_end,
)
from tests.helpers.mock_oracle import mock_generate
from tests.helpers.scheduler_harness import counted_lookups

BLOCK = 4
COMMON = tuple(range(10, 30))
"""Five blocks that prompts begin with."""


class CountingRunner(FaultyRunner):
    """Counts how often each token of each text was computed, by its position and all tokens up to it."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.num_computed_tokens = 0

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        self.num_computed_tokens += plan.num_tokens
        return super().execute(plan, table)


def small_core(runner: type[MockRunner] = MockRunner, **arguments: Any) -> EngineCore:
    return make_core(runner, **{"block_size": BLOCK, "num_kv_blocks": 64, "max_num_seqs": 8, **arguments})


def begins_alike(count: int, common: Sequence[int] = COMMON, **sampling: Any) -> list[InferRequest]:
    return [make_request(f"r{i}", (*common, 100 + i, 7), **sampling) for i in range(count)]


def salted(request: InferRequest, salt: str) -> InferRequest:
    return msgspec.structs.replace(request, cache_salt=salt)


def cached_tokens(core: EngineCore, request: InferRequest) -> int:
    """Runs one request to its end; how many of its tokens were found. Its tokens are the oracle's."""
    outputs: list[StepOutput] = []
    core.add(request)
    outcomes = Outcomes()
    while core.has_work:
        outputs += outcomes.add(core.step()).outputs
        core.check()
    expect_oracle(outcomes[request.request_id], request)
    assert len({output.num_cached_tokens for output in outputs}) == 1, "all outputs of a request say the same"
    return outputs[0].num_cached_tokens


# --- what is found ----------------------------------------------------------------------------------------------------


def test_full_blocks_of_a_request_that_is_over_are_found_and_its_last_token_never() -> None:
    core = small_core()
    assert cached_tokens(core, make_request("first", COMMON)) == 0
    assert cached_tokens(core, make_request("again", COMMON)) == 16, "the fifth block has the last token"
    assert cached_tokens(core, make_request("longer", (*COMMON, 1))) == 20
    assert cached_tokens(core, make_request("shorter", COMMON[:10])) == 8
    assert cached_tokens(core, make_request("other end", (*COMMON[:9], 1, 2, 3))) == 8
    assert cached_tokens(core, make_request("other beginning", (1, *COMMON[1:]))) == 0


def test_the_output_is_found_as_the_prompt_of_the_next_turn() -> None:
    core = small_core()
    first = make_request("first", COMMON, max_tokens=9, ignore_eos=True)
    output = mock_generate(first).token_ids
    assert cached_tokens(core, first) == 0
    assert cached_tokens(core, make_request("next turn", (*COMMON, *output, 3, 4))) == 28, "but the last output's KV"


def test_a_resumed_request_counts_tokens_of_its_prompt_alone_as_cached() -> None:
    core = small_core()
    whole = make_request("whole", COMMON[:5], max_tokens=20, ignore_eos=True)
    cached_tokens(core, whole)
    resumed = msgspec.structs.replace(whole, output_token_ids=mock_generate(whole).token_ids[:16])
    assert cached_tokens(core, resumed) == 5


def test_equal_blocks_after_different_texts_are_not_confused() -> None:
    core = small_core()
    a, b, same = (1, 2, 3, 4), (5, 6, 7, 8), (9, 9, 9, 9)
    cached_tokens(core, make_request("a", (*a, *same, 1)))
    assert cached_tokens(core, make_request("b", (*b, *same, 1))) == 0
    assert cached_tokens(core, make_request("ba", (*b, *a, *same, 1))) == 4
    assert cached_tokens(core, make_request("same", (*same, *same, 1))) == 0


def test_a_salt_parts_what_is_shared() -> None:
    core = small_core()
    request = make_request("r", COMMON)
    assert cached_tokens(core, request) == 0
    assert cached_tokens(core, salted(request, "one")) == 0
    assert cached_tokens(core, salted(request, "two")) == 0
    assert [cached_tokens(core, salted(request, salt)) for salt in ("one", "two", "")] == [16, 16, 16]


def test_a_tenant_parts_what_is_shared_and_its_salts_are_its_own() -> None:
    core = small_core()
    request = make_request("r", COMMON)
    for tenant in ("alice", "bob", ""):
        mine = msgspec.structs.replace(request, tenant=tenant)
        assert [cached_tokens(core, mine) for _ in range(2)] == [0, 16]
        assert [cached_tokens(core, salted(mine, "s")) for _ in range(2)] == [0, 16]


def test_tenant_adapter_and_salt_are_never_taken_for_each_other() -> None:
    """For any text in a client's salt, separators and the names of others included."""
    texts = ("", "A", "x", "A\0x", "\0", "\0A", "A\0", "A\0x\0", "('A', 'x')")
    keys = [
        InferRequest(
            request_id="r",
            prompt_token_ids=(1,),
            sampling=SamplingParams(),
            tenant=tenant,
            lora_name=lora_name,
            cache_salt=cache_salt,
        ).prefix_salt
        for tenant in texts
        for lora_name in texts
        for cache_salt in texts
    ]
    assert len(set(keys)) == len(texts) ** 3


def test_the_tenant_of_a_request_reaches_the_engine_process() -> None:
    request = make_request("r", COMMON)
    request = msgspec.structs.replace(request, tenant="alice", lora_name="A", cache_salt="B\0C")
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(EngineInput(add=(request,))), type=EngineInput)
    assert sent.add[0].prefix_salt == ("alice", "A", "B\0C")


def test_without_prefix_caching_nothing_is_found() -> None:
    core = small_core(enable_prefix_caching=False)
    stats = [run_counted(core, begins_alike(6))[1] for _ in range(2)][-1]
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)


def test_hits_are_counted_in_tokens() -> None:
    core = small_core()
    _, stats = run_counted(core, begins_alike(3))
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (3 * 22, 2 * 20)


def test_a_prompt_that_is_computed_as_a_whole_is_no_query() -> None:
    _, stats = run_counted(small_core(), begins_alike(3, prompt_logprobs=0))
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (0, 0)


# --- computed once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [512, 30, 7, 3])
def test_a_crowd_that_comes_at_once_computes_what_it_shares_once(budget: int) -> None:
    core = small_core(CountingRunner, max_num_seqs=16, num_kv_blocks=128, max_num_batched_tokens=budget)
    crowd = begins_alike(16, max_tokens=1)
    outcomes = run_to_end(core, crowd)
    for request in crowd:
        expect_oracle(outcomes[request.request_id], request)
    runner = core._runner
    assert isinstance(runner, CountingRunner)
    assert runner.num_computed_tokens == len(COMMON) + 16 * 2


def test_a_request_that_waits_for_a_block_under_way_waits_one_step_and_does_not_block_others() -> None:
    core = small_core(max_num_batched_tokens=100)
    first, second = begins_alike(2, max_tokens=4, ignore_eos=True)
    other = make_request("other", (1, 2, 3), max_tokens=4, ignore_eos=True)
    for request in (first, second, other):
        core.add(request)
    seen = [{output.request_id for output in core.step().outputs} for _ in range(2)]
    assert seen == [{"r0", "other"}, {"r0", "r1", "other"}]


def test_requests_that_overtake_one_that_waits_for_a_block_leave_it_its_row_and_its_blocks() -> None:
    for rows, blocks, after in ((2, 64, {"r0", "r1"}), (8, 12, {"r0", "r1", "other"})):
        core = small_core(max_num_batched_tokens=100, max_num_seqs=rows, num_kv_blocks=blocks)
        first, second = begins_alike(2, max_tokens=2, ignore_eos=True)
        other = make_request("other", (1, 2, 3), max_tokens=50, ignore_eos=True)
        for request in (first, second, other):
            core.add(request)
        seen = [{output.request_id for output in core.step().outputs} for _ in range(2)]
        assert seen == [{"r0"}, after]


def test_a_step_looks_up_few_requests_that_wait_for_a_block() -> None:
    core = small_core(max_num_batched_tokens=100, max_num_seqs=64, num_kv_blocks=512)
    for request in begins_alike(2 + MAX_OVERTAKEN, max_tokens=2, ignore_eos=True):
        core.add(request)
    core.add(make_request("other", (1, 2, 3), max_tokens=2, ignore_eos=True))
    assert {output.request_id for output in core.step().outputs} == {"r0"}
    assert len(core.step().outputs) == 3 + MAX_OVERTAKEN


def test_requests_that_wait_for_a_block_are_looked_up_again_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long prompt computes two tokens in a step, because those that wait do not use their half."""
    core = small_core(max_num_batched_tokens=2, long_prefill_token_threshold=8)
    lookups = counted_lookups(core._kv_cache, monkeypatch)
    core.add(make_request("long", COMMON))
    for request in begins_alike(3, COMMON[:BLOCK]):
        core.add(request)
    for num_lookups in (4, 4, 5):
        assert not core.step().outputs
        assert len(lookups) == num_lookups
    run_to_end(core)


def test_a_request_that_needs_no_block_under_way_does_not_wait() -> None:
    """Though it found a beginning, and others compute what follows it in another text."""
    core = small_core(max_num_batched_tokens=100)
    cached_tokens(core, make_request("earlier", COMMON))
    core.add(make_request("running", (*COMMON, *range(50)), max_tokens=9, ignore_eos=True))
    core.step()
    core.add(make_request("other", (*COMMON[:9], 1, 2, 3, 4), max_tokens=9, ignore_eos=True))
    assert {one.request_id: one.num_cached_tokens for one in core.step().outputs} == {"running": 20, "other": 8}


def test_a_request_that_waits_for_a_block_goes_on_when_its_maker_is_gone() -> None:
    core = small_core(max_num_batched_tokens=8)
    first, second = begins_alike(2)
    core.add(first)
    core.add(second)
    core.step()
    core.abort("r0")
    outcomes = run_to_end(core)
    expect_oracle(outcomes["r1"], second)


def test_running_requests_hold_what_they_share_once() -> None:
    core = small_core()
    for request in begins_alike(4, max_tokens=50, ignore_eos=True):
        core.add(request)
    core.step()
    stats = core.step().stats
    assert stats.num_requests_running == 4
    assert stats.num_blocks - stats.num_free_blocks == 5 + 4


def test_a_request_that_fits_only_because_it_shares_is_admitted() -> None:
    core = small_core(num_kv_blocks=8)
    for request in begins_alike(2, max_tokens=2, ignore_eos=True):
        core.add(request)
    core.step()
    assert core.step().stats.num_requests_running == 1, "the first has ended; without sharing 12 blocks would be needed"
    core.check()


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    core = small_core(CountingRunner, num_kv_blocks=7, max_num_batched_tokens=64)
    requests = [make_request(f"r{i}", (i, *range(11)), max_tokens=5, ignore_eos=True) for i in range(2)]
    for request in requests:
        core.add(request)
    outcomes, found = Outcomes(), set()
    while core.has_work:
        result = outcomes.add(core.step())
        found |= {output.num_cached_tokens for output in result.outputs}
        core.check()
    for request in requests:
        expect_oracle(outcomes[request.request_id], request)
    stats = result.stats
    assert stats.num_preemptions == 1
    assert (found, stats.prefix_cache_queries, stats.prefix_cache_hits) == ({0}, 24, 0), "for its client it found none"
    runner = core._runner
    assert isinstance(runner, CountingRunner)
    assert runner.num_computed_tokens < 2 * 16 + 12, "not all of it was computed again"


def test_equal_requests_at_once_keep_the_block_that_was_first() -> None:
    core = small_core()
    twins = [make_request(f"r{i}", COMMON[:6], max_tokens=30, ignore_eos=True) for i in range(4)]
    outcomes = run_to_end(core, twins)
    for request in twins:
        expect_oracle(outcomes[request.request_id], request)
    output = mock_generate(twins[0]).token_ids
    assert cached_tokens(core, make_request("next", (*COMMON[:6], *output, 1))) == 32


# --- what is reused ---------------------------------------------------------------------------------------------------


def test_the_end_of_a_text_is_reused_before_its_beginning_and_the_oldest_text_first() -> None:
    core = small_core(num_kv_blocks=12)
    old, new = tuple(range(50, 70)), tuple(range(80, 100))
    for name, text in (("old", old), ("new", new)):
        cached_tokens(core, make_request(name, (*text, 1), max_tokens=1))
    cached_tokens(core, make_request("third", (*range(20), 1), max_tokens=1))
    # Two blocks were free; six were needed: four of the old text's five went, from its end.
    assert cached_tokens(core, make_request("new again", (*new, 2), max_tokens=1)) == 20
    assert cached_tokens(core, make_request("old again", (*old, 2), max_tokens=1)) == 4


def test_a_block_that_is_found_again_is_young_again() -> None:
    core = small_core(num_kv_blocks=12)
    for text in (50, 80, 50):
        cached_tokens(core, make_request(str(text), (*range(text, text + 20), 1), max_tokens=1))
    cached_tokens(core, make_request("third", (*range(20), 1), max_tokens=1))
    assert cached_tokens(core, make_request("50 again", (*range(50, 70), 1), max_tokens=1)) == 20


def test_usage_counts_what_requests_hold_alone() -> None:
    core = small_core()
    _, stats = run_counted(core, begins_alike(3))
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.kv_cache_usage == 0.0


# --- what failed is not found -----------------------------------------------------------------------------------------


def test_a_row_that_fails_leaves_none_of_its_blocks_to_others() -> None:
    """Neither those of earlier steps nor those of the step that failed."""
    core = small_core(FaultyRunner, max_num_batched_tokens=8)
    prompt = (FaultyRunner.NAN, *COMMON)
    outcomes = run_to_end(core, [make_request("bad", prompt)])
    assert outcomes["bad"].finish_reason == "error"
    assert core._kv_cache.num_cached_blocks == 0
    outcomes = run_to_end(core, [make_request("again", prompt)])
    assert outcomes["again"].finish_reason == "error"
    assert core.step().stats.prefix_cache_hits == 0


class FailsOnce(MockRunner):
    """Says of the row with the marked last token that its logits are no numbers."""

    MARK = 222

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        sampled = super().execute(plan, table)
        rows = plan.rows[plan.sample_rows]
        bad = rows[table.token_ids[rows, table.num_tokens[rows] - 1] == self.MARK].tolist()
        return SampledTokens(sampled.token_ids, sampled.logprobs, dict.fromkeys(bad, "its logits are not numbers"))


def test_a_row_that_fails_on_what_it_found_takes_it_out() -> None:
    """What it found may be why it failed; the next request computes it anew."""
    core = small_core(FailsOnce)
    first, last = make_request("first", (*COMMON, 1)), make_request("last", (*COMMON, 2))
    assert cached_tokens(core, first) == 0
    assert run_to_end(core, [make_request("bad", (*COMMON, FailsOnce.MARK))])["bad"].finish_reason == "error"
    assert cached_tokens(core, last) == 0
    assert cached_tokens(core, last) == 20


def test_a_row_that_shares_with_one_that_fails_goes_on_but_extends_nothing_forgotten() -> None:
    core = small_core(FailsOnce)
    good = make_request("good", (*COMMON, 1), max_tokens=20, ignore_eos=True)
    core.add(good)
    outcomes = Outcomes()
    outcomes.add(core.step())
    core.add(make_request("bad", (*COMMON, FailsOnce.MARK)))
    outcomes.add(core.step())
    assert outcomes["bad"].finish_reason == "error"
    while core.has_work:
        outcomes.add(core.step())
        core.check()
    expect_oracle(outcomes["good"], good)
    assert cached_tokens(core, make_request("again", (*COMMON, 1))) == 0


def test_an_aborted_request_leaves_what_it_computed() -> None:
    core = small_core(max_num_batched_tokens=8)
    core.add(make_request("gone", COMMON))
    core.step()
    core.abort("gone")
    core.step()
    assert cached_tokens(core, make_request("next", COMMON)) == 8


# --- in any order of events -------------------------------------------------------------------------------------------

texts = st.sampled_from(
    [tuple((text + at // 5 * text) % 256 for at in range(length)) for text in (1, 2) for length in (3, 8, 9, 13, 24)]
)
requests = st.builds(
    lambda common, own, tokens, seed, salt, priority: (common + tuple(own), tokens, seed, salt, priority),
    texts,
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.sampled_from((1, 6, 20)),
    st.integers(0, 2),
    st.sampled_from(("", "", "", "salt")),
    st.integers(0, 1),
)
moves = st.lists(st.one_of(requests, st.integers(1, 6), st.just("abort")), min_size=5, max_size=40)


def drive(core: EngineCore, script: list[Any]) -> tuple[dict[str, InferRequest], Outcomes, Any]:
    added: dict[str, InferRequest] = {}
    outcomes = Outcomes()
    for move in script:
        if move == "abort":
            core.abort(f"r{len(added) // 2}")
        elif isinstance(move, int):
            for _ in range(move if core.has_work else 0):
                outcomes.add(core.step())
                core.check()
        else:
            prompt, tokens, seed, salt, priority = move
            request = make_request(f"r{len(added)}", prompt, priority, max_tokens=tokens, seed=seed, temperature=0.8)
            added[request.request_id] = salted(request, salt)
            core.add(added[request.request_id])
    stats = core.step().stats if not core.has_work else None
    while core.has_work:
        stats = outcomes.add(core.step()).stats
        core.check()
    return added, outcomes, stats


@given(
    script=moves,
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 8),
    max_num_seqs=st.sampled_from((6, 2, 1)),
    max_num_batched_tokens=st.sampled_from((64, 9, 1)),
)
def test_tokens_are_those_of_each_request_alone(
    script: list[Any], block_size: int, spare_blocks: int, **arguments: Any
) -> None:
    core = make_core(block_size=block_size, num_kv_blocks=-(-50 // block_size) + spare_blocks, **arguments)
    added, outcomes, _ = drive(core, script)
    for name, request in added.items():
        if outcomes[name].finish_reason != "abort":
            expect_oracle(outcomes[name], request)
        else:
            assert outcomes[name].token_ids == mock_generate(request).token_ids[: len(outcomes[name].token_ids)]


def test_a_long_random_life_has_hits_preemptions_and_reuse() -> None:
    """What the test above relies on does happen."""
    draw = np.random.default_rng(4)
    core = make_core(block_size=4, num_kv_blocks=20, max_num_seqs=8, max_num_batched_tokens=40)
    script: list[Any] = []
    for _ in range(150):
        start, length = int(draw.choice([0, 0, 0, 60])), int(draw.choice([8, 16, 24]))
        prompt = (*range(start, start + length), int(draw.integers(256)))
        salt = str(draw.choice(["", "", "", "a"]))
        script += [(prompt, int(draw.integers(1, 25)), 1, salt, 0), int(draw.integers(1, 4))]
    added, outcomes, stats = drive(core, script)
    for name, request in added.items():
        expect_oracle(outcomes[name], request)
    assert stats.num_preemptions > 5
    assert 0.3 < stats.prefix_cache_hits / stats.prefix_cache_queries < 0.95


# --- the index alone --------------------------------------------------------------------------------------------------


def test_the_index_forgets_what_comes_after_a_forgotten_block() -> None:
    cache = PrefixCache(8)
    first = cache.register((), b"aa", 0)
    second = cache.register(first, b"bb", 1)
    cache.forget(0)
    assert cache.find((), b"aabb", 2).blocks.tolist() == []
    assert cache.register(first, b"cc", 2) == first, "nothing is registered after it"
    assert 2 not in cache
    renewed = cache.register((), b"aa", 3)
    assert renewed not in (first, second)
    assert cache.find((), b"aabb", 2).blocks.tolist() == [3]
    cache.check()


def test_the_index_keeps_the_first_of_two_equal_blocks() -> None:
    cache = PrefixCache(8)
    assert cache.register((), b"aa", 0) == cache.register((), b"aa", 1)
    assert cache.find((), b"aa", 2).blocks.tolist() == [0]
    assert 1 not in cache


# --- a real model -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_logprobs_of_a_real_model_do_not_change_by_a_bit(dtype: str, tmp_path: Path) -> None:
    import transformers as tf  # most tests here do without

    config = tf.Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    config.save_pretrained(tmp_path)
    common = np.random.default_rng(3).integers(0, 512, 40).tolist()
    wanted = [
        InferRequest(
            request_id=str(i),
            prompt_token_ids=(*common, *range(i, i + 5)),
            sampling=SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1, temperature=0.7, seed=i),
        )
        for i in range(5)
    ]
    plain, plain_hits = run_real(tmp_path, wanted, dtype, enable_prefix_caching=False)
    cached, hits = run_real(tmp_path, wanted, dtype)
    assert (plain_hits, hits) == (0, 4 * 40)
    assert cached == plain


def run_real(path: Path, wanted: list[InferRequest], dtype: Any, **options: Any) -> tuple[dict[str, Any], int]:
    from llmbackend.engine.model.module_runner import make_model_runner

    config = EngineConfig(
        model=str(path), load_format="dummy", dtype=dtype, block_size=8, num_kv_blocks=60, num_threads=1, **options
    )
    core = EngineCore(config, make_model_runner(config))
    outcomes, stats = run_counted(core, wanted)
    core.close()
    assert not any(outcome.error for outcome in outcomes.of.values())
    return {name: outcome.logprobs for name, outcome in outcomes.of.items()}, stats.prefix_cache_hits
