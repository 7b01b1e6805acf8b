"""N-gram speculation: what is proposed, what holds, and that nothing but the number of steps changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.engine.config import EngineConfig, SpeculativeConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import EngineStats, InferRequest, SamplingParams
from llmbackend.engine.sampling.torch_sampling import TorchSampler
from llmbackend.engine.scheduling.drafting import MAX_PAUSE_STEPS, Speculator
from llmbackend.engine.scheduling.steps_in_flight import num_accepted, num_equal_drafts
from llmbackend.engine.step import BROKEN_LOGITS, NO_TOKEN, RowTable, SampledTokens, StepPlan
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.mock_engine import expect_oracle, make_core, make_request, run_counted, run_to_end
from tests.helpers.repeating_text import repeat_text

EAGER = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1, max_step_tokens=16)


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> None:
    repeat_text(monkeypatch)


def int32(values: Iterable[int]) -> Any:
    return np.array(list(values), np.int32)


# --- what is proposed -------------------------------------------------------------------------------------------------


class Text:
    """One row and the drafts it is given."""

    def __init__(self, tokens: Iterable[int], **config: Any) -> None:
        config = {"num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1, **config}
        self.table = RowTable(2, 4096, 16)
        self.speculator = Speculator(SpeculativeConfig(**config), self.table, config.get("max_step_tokens", 8))
        self.append(*tokens)

    def append(self, *tokens: int) -> None:
        num_tokens = int(self.table.num_tokens[1])
        self.table.token_ids[1, num_tokens : num_tokens + len(tokens)] = tokens
        self.table.num_tokens[1] += len(tokens)

    def draft(self, left: int = 1000, room: int = 500) -> list[int]:
        plan = StepPlan(int32([1]), int32([1]), np.array([True]))
        num_tokens = int(self.table.num_tokens[1])
        drafts = self.speculator.draft(plan, [num_tokens + left], room)
        return [] if drafts is None else self.table.token_ids[1, num_tokens : num_tokens + int(drafts[0])].tolist()

    def learn(self, drafted: int, accepted: int) -> None:
        self.speculator.learn(int32([1]), int32([drafted]), int32([accepted]))

    def widen(self, width: int) -> None:
        self.draft()
        self.speculator._states[1].width = width


def draft(tokens: Iterable[int], **config: Any) -> list[int]:
    text = Text(tokens, **config)
    text.widen(4)
    return text.draft()


def test_a_draft_is_what_followed_the_same_words_before() -> None:
    assert draft([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]


def test_the_longest_ending_wins_and_of_equals_the_latest() -> None:
    assert draft([1, 2, 3, 9, 2, 3, 5, 7, 1, 2, 3])[0] == 9
    assert draft([1, 2, 3, 9, 8, 2, 3, 5, 7, 0, 2, 3])[0] == 5


def test_an_ending_shorter_than_the_least_length_is_not_looked_up() -> None:
    assert draft([1, 2, 3, 7, 2], prompt_lookup_min=2) == []
    assert draft([1, 2, 3, 1, 2], prompt_lookup_min=2)[0] == 3


def test_a_text_without_repeats_has_no_drafts() -> None:
    assert draft(range(50)) == []
    assert draft([5]) == []


def test_a_short_cycle_goes_on() -> None:
    assert draft([7, 8, 7, 8, 7, 8]) == [7, 8, 7, 8]
    assert draft([3, 3]) == [3, 3, 3, 3]


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    cuts=st.sets(st.integers(1, 59)),
    longest=st.integers(1, 4),
    data=st.data(),
)
def test_the_index_finds_what_a_search_finds(
    tokens: list[int], cuts: set[int], longest: int, data: st.DataObject
) -> None:
    shortest = data.draw(st.integers(1, longest))
    text = Text([], prompt_lookup_max=longest, prompt_lookup_min=shortest)
    for known, token in enumerate(tokens, 1):
        text.append(token)
        if known in cuts or known == len(tokens):
            found = text.draft()
            assert found == search(tokens[:known], shortest, longest)


def search(tokens: list[int], shortest: int, longest: int) -> list[int]:
    """The first draft, by definition."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:] and len(tokens) > n:
                return [tokens[end]]
    return []


def test_drafts_that_hold_grow_and_ones_that_fail_shrink() -> None:
    text = Text([7, 8] * 4)
    lengths = []
    for accepted in (1, 2, 4, 3, 1, 0):
        lengths.append(len(text.draft()))
        text.learn(lengths[-1], accepted)
    assert lengths == [1, 2, 4, 4, 4, 2]


def test_pauses_double_while_drafts_do_not_pay() -> None:
    """Alone, drafts pay while more than one in max_step_tokens holds."""
    text, pauses = Text([7, 8] * 4, max_step_tokens=4), []
    for _ in range(10):
        waited = 0
        while not text.draft():
            text.append(7, 8)
            waited += 2
        pauses.append(waited)
        text.learn(1, 0)
    assert pauses == [0, 0, 0, 2, 2, 4, 8, 16, MAX_PAUSE_STEPS, MAX_PAUSE_STEPS]
    text.append(*[7, 8] * MAX_PAUSE_STEPS)
    text.learn(1, 1)
    assert text.draft(), "one that holds ends the pauses of a row that is alone"


def test_in_company_drafts_must_hold_more_often_to_pay() -> None:
    table = RowTable(8, 64, 16)
    table.token_ids[:, :8] = [7, 8] * 4
    table.num_tokens[:] = 8
    for num_rows, pays in ((1, True), (3, True), (4, False), (7, False)):
        speculator = Speculator(SpeculativeConfig(), table, 8)
        rows, ones = int32(range(num_rows)), int32([1] * num_rows)
        plan = StepPlan(rows, ones, np.ones(num_rows, np.bool_))
        assert speculator.draft(plan, [20] * num_rows, 8) is not None
        speculator.learn(rows, ones * 4, ones * 2)
        assert (speculator.draft(plan, [20] * num_rows, 8) is not None) == pays, num_rows


def test_a_row_forgets_its_last_request() -> None:
    text = Text([7, 8] * 4)
    text.widen(4)
    text.speculator.forget(1)
    assert len(text.draft()) == 1
    text.speculator.forget(0)


def test_drafts_stay_within_the_request_and_the_step() -> None:
    text = Text([7, 8] * 4)
    text.widen(4)
    assert [len(text.draft(left=left)) for left in (1, 2, 3, 9)] == [0, 1, 2, 4]
    assert [len(text.draft(room=room)) for room in (0, 1, 3, 9)] == [0, 1, 3, 4]


def test_rows_share_the_room_of_a_step_and_a_chunk_of_a_prompt_has_none() -> None:
    table = RowTable(4, 64, 16)
    table.token_ids[:, :8] = [7, 8] * 4
    table.num_tokens[:] = 8
    speculator = Speculator(EAGER, table, 16)
    plan = StepPlan(int32([2, 0, 1, 3]), int32([1, 3, 1, 1]), np.array([True, True, True, True]))
    for width in (1, 5):
        drafts = speculator.draft(plan, [20] * 4, 7)
        assert drafts is not None
        assert drafts.tolist() == ([1, 0, 1, 1] if width == 1 else [2, 0, 3, 2])
        for state in speculator._states.values():
            state.width = 5
    assert speculator.draft(StepPlan(int32([0]), int32([1]), np.array([False])), [20], 7) is None


# --- what holds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        ([1, 2, 3, 4], [[1, 2, 3, 4]]),
        ([1, 2, 9, 4], [[1, 2, 9]]),
        ([9, 2, 3, 4], [[9]]),
        ([1, 2, 3, NO_TOKEN], [[1, 2, 3]]),
        ([1, NO_TOKEN, 3, 4], [[1]]),
        ([9, NO_TOKEN, 3, 4], [[9]]),
        ([NO_TOKEN, 2, 3, 4], [[NO_TOKEN]]),
    ],
)
def test_tokens_hold_up_to_the_first_wrong_draft(sampled: list[int], expected: list[list[int]]) -> None:
    table = RowTable(3, 8, 4)
    table.num_tokens[:] = [5, 2, 5]
    table.token_ids[2, 5:8] = 1, 2, 3
    plan = StepPlan(int32([0, 2, 1]), int32([3, 4, 1]), np.array([False, True, True]), int32([0, 3, 0]))
    assert plan.num_samples == 5
    assert [array.tolist() for array in plan.samples(table)] == [[2, 2, 2, 2, 1], [5, 6, 7, 8, 2]]
    token_ids = int32([*sampled, 6])
    equal = num_equal_drafts(plan, token_ids, table)
    accepted = num_accepted(plan, SampledTokens(token_ids, num_accepted_tokens=equal)).tolist()
    assert [token_ids[: 1 + accepted[1]].tolist(), token_ids[4 : 5 + accepted[2]].tolist()] == [*expected, [6]]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "seed": 3, "top_k": 50, "logprobs": 0},
        {"temperature": 0.9, "seed": 4, "frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.5},
        {"temperature": 0.0, "frequency_penalty": 50.0, "min_tokens": 3, "stop_token_ids": tuple(range(30))},
    ],
)
def test_the_sampler_takes_a_draft_for_an_output_token(sampling: dict[str, Any]) -> None:
    """Several positions of a row at once give what one after the other gives, penalties and min_tokens included."""
    request = InferRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(**sampling))
    table, sampler = RowTable(2, 16, 4), TorchSampler(2, 40, (39,))
    table.token_ids[1, :7] = [1, 2, 30, 31, 30, 32, 30]
    table.num_prompt_tokens[1], table.num_tokens[1] = 2, 3
    sampler.add_row(1, request)
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)).expand(5, -1)
    together = sampler.sample(int32([1] * 5), int32(range(3, 8)), logits, table)
    assert len(set(together.token_ids.tolist())) > 1 or "logprobs" in sampling
    for i in range(5):
        table.num_tokens[1] = 3 + i
        alone = sampler.sample(int32([1]), int32([3 + i]), logits[:1], table)
        assert alone.token_ids[0] == together.token_ids[i]
        assert list(together.logprobs.get(1, ()))[i : i + 1] == list(alone.logprobs.get(1, ()))


def test_broken_logits_behind_a_draft_are_no_error_yet() -> None:
    sampler, table = TorchSampler(2, 40, ()), RowTable(2, 16, 4)
    table.num_tokens[:] = 3
    for row in (0, 1):
        request = InferRequest(request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(logprobs=0, seed=row))
        sampler.add_row(row, request)
    logits = torch.zeros(4, 40)
    logits[1, 5] = logits[2, 5] = float("nan")
    sampled = sampler.sample(int32([0, 0, 1, 1]), int32([3, 4, 3, 4]), logits, table)
    assert dict(sampled.errors) == {1: BROKEN_LOGITS}
    assert (sampled.token_ids == NO_TOKEN).tolist() == [False, True, True, False]
    assert len(sampled.logprobs[0]) == 2


# --- the engine: fewer steps, and nothing else ------------------------------------------------------------------------

sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from((1, 2, 9, 30)),
    min_tokens=st.sampled_from((0, 0, 5)),
    temperature=st.sampled_from((0.0, 0.9)),
    top_p=st.sampled_from((1.0, 0.8)),
    repetition_penalty=st.sampled_from((1.0, 1.2)),
    frequency_penalty=st.sampled_from((0.0, 2.0)),
    seed=st.integers(0, 7),
    stop_token_ids=st.sampled_from(((), (41, 45, 49))),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from((None, 0, 2)),
)
prompts = st.lists(st.integers(40, 44), min_size=1, max_size=20).map(tuple)
OPTIONS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from((1, 3, 16)),
        "max_num_seqs": st.sampled_from((1, 4)),
        "max_num_batched_tokens": st.sampled_from((2, 5, 64)),
        "num_kv_blocks": st.sampled_from((16, 60)),
        "enable_prefix_caching": st.booleans(),
    }
)


@pytest.mark.slow
@given(specs=st.lists(st.tuples(prompts, sampling_params), min_size=1, max_size=6), options=OPTIONS)
def test_speculation_changes_no_request(specs: list[tuple[Any, SamplingParams]], options: dict[str, Any]) -> None:
    options["num_kv_blocks"] *= -(-4 // options["block_size"])
    with pytest.MonkeyPatch.context() as monkeypatch:
        repeat_text(monkeypatch)
        requests = [
            InferRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling)
            for i, (prompt, sampling) in enumerate(specs)
        ]
        outcomes = run_to_end(make_core(speculative_config=EAGER, max_model_len=36, **options), requests)
        for request in requests:
            expect_oracle(outcomes[request.request_id], request, max_model_len=36)


def test_a_gpus_steps_may_have_more_drafts() -> None:
    def most(device: str, **options: Any) -> int:
        speculation = SpeculativeConfig(max_step_tokens=options.pop("max_step_tokens", None))
        return EngineConfig(
            model="m", device=device, speculative_config=speculation, **options
        ).max_speculative_step_tokens

    assert (most("cpu"), most("cuda:1"), most("cuda", max_step_tokens=20)) == (8, 64, 20)
    assert most("cuda", max_num_batched_tokens=30) == 30
    assert EngineConfig(model="m", device="cuda").max_speculative_step_tokens == 0


def chatty_requests(count: int = 4) -> list[InferRequest]:
    return [
        make_request(f"r{i}", (40 + i, 41), max_tokens=60, ignore_eos=True, temperature=0.8 * (i % 2), logprobs=1)
        for i in range(count)
    ]


@pytest.mark.usefixtures("repeating")
def test_text_that_repeats_takes_fewer_steps() -> None:
    requests = chatty_requests(2)
    _, plain = run_counted(make_core(), requests)
    outcomes, fast = run_counted(make_core(speculative_config=EAGER), requests)
    for request in requests:
        expect_oracle(outcomes[request.request_id], request)
    assert fast.num_steps < 0.75 * plain.num_steps
    assert fast.generation_tokens == plain.generation_tokens == 120
    assert 0 < fast.num_drafts <= fast.num_accepted_tokens < fast.num_draft_tokens
    assert (plain.num_drafts, plain.num_draft_tokens, plain.num_accepted_tokens) == (0, 0, 0)


@pytest.mark.slow
def test_text_that_does_not_repeat_is_soon_left_alone() -> None:
    requests = [make_request("r", range(200), max_tokens=200, ignore_eos=True)]
    outcomes, stats = run_counted(make_core(speculative_config=EAGER), requests)
    expect_oracle(outcomes["r"], requests[0])
    assert 0 < stats.num_draft_tokens < 30


@pytest.mark.usefixtures("repeating")
def test_a_crowded_step_has_no_drafts() -> None:
    requests = [msgspec.structs.replace(one, request_id=f"r{i}") for i, one in enumerate(chatty_requests(1) * 16)]
    _, stats = run_counted(make_core(speculative_config=EAGER), requests)
    assert stats.num_draft_tokens == 0
    _, stats = run_counted(make_core(speculative_config=EAGER), requests[:15])
    assert stats.num_draft_tokens > 0


class StrictRunner(MockRunner):
    """Checks the plans it gets, and fails where it is told to: fails_at is a number of tokens at which every execution
    raises that is not of one row alone; broken_at is one that the model has no finite logits for."""

    fails_at = broken_at = -1

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        reach = table.num_computed_tokens[plan.rows] + plan.num_scheduled_tokens
        drafts = np.zeros_like(reach) if plan.num_draft_tokens is None else plan.num_draft_tokens
        assert (reach <= table.max_model_len).all()
        assert ((reach - drafts == table.num_tokens[plan.rows]) == plan.sample_rows).all()
        assert plan.sample_rows[drafts > 0].all()
        for row, end in zip(plan.rows.tolist(), reach.tolist(), strict=True):
            assert len(set(table.block_table[row, : -(-end // table.block_size)].tolist())) == -(
                -end // table.block_size
            )
        sampled = super().execute(plan, table)
        if len(plan.rows) > 1 and (table.num_tokens[plan.rows] == self.fails_at).any():
            raise RuntimeError("this execution fails")
        rows, positions = plan.samples(table)
        broken = positions == self.broken_at
        first = rows[broken & (positions == table.num_tokens[rows])].tolist()
        token_ids = np.where(broken, NO_TOKEN, sampled.token_ids)
        return SampledTokens(token_ids, sampled.logprobs, dict.fromkeys(first, BROKEN_LOGITS))


@pytest.mark.usefixtures("repeating")
def test_a_batch_that_fails_is_run_row_by_row_with_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StrictRunner, "fails_at", 20)
    requests = chatty_requests()
    outcomes, stats = run_counted(make_core(StrictRunner, speculative_config=EAGER), requests)
    assert stats.num_accepted_tokens
    for request in requests:
        expect_oracle(outcomes[request.request_id], request)


@pytest.mark.usefixtures("repeating")
@pytest.mark.parametrize("position", range(20, 26))
def test_broken_logits_end_a_request_where_they_would_without_drafts(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StrictRunner, "broken_at", position)
    requests = chatty_requests()
    outcomes, stats = run_counted(make_core(StrictRunner, speculative_config=EAGER), requests)
    plain, _ = run_counted(make_core(StrictRunner), requests)
    assert stats.num_accepted_tokens
    for request in requests:
        name = request.request_id
        assert outcomes[name] == plain[name]
        assert (len(outcomes[name].token_ids), outcomes[name].error) == (position - 2, BROKEN_LOGITS)


@pytest.mark.usefixtures("repeating")
def test_drafts_take_free_blocks_only() -> None:
    """In a pool that one request fills to its last block, drafts go without a block rather than preempt or fail."""
    request = make_request("r", (40, 41), max_tokens=22, ignore_eos=True)
    for num_kv_blocks in (23, 24):  # the last token needs no block
        core = make_core(StrictRunner, speculative_config=EAGER, block_size=1, num_kv_blocks=num_kv_blocks)
        outcomes, stats = run_counted(core, [request])
        expect_oracle(outcomes["r"], request)
        assert stats.num_preemptions == 0
    others = [make_request(f"o{i}", (42 + i, 41), max_tokens=22, ignore_eos=True) for i in range(3)]
    core = make_core(StrictRunner, speculative_config=EAGER, block_size=2, num_kv_blocks=24)
    outcomes, stats = run_counted(core, [request, *others])
    assert stats.num_preemptions
    assert stats.num_accepted_tokens
    for one in (request, *others):
        expect_oracle(outcomes[one.request_id], one)


# --- a real model -----------------------------------------------------------------------------------------------------


def real_requests() -> list[InferRequest]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.4, "seed": 7, "top_p": 0.95},
        {"temperature": 0.0, "frequency_penalty": 0.3},
        {"temperature": 0.5, "seed": 9, "top_k": 20, "min_tokens": 9, "stop_token_ids": tuple(range(0, 512, 9))},
    ]
    return [
        InferRequest(
            request_id=str(i),
            prompt_token_ids=(3, 5, 8, 13, 21, i) * 4,
            sampling=SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1, **kind),
        )
        for i, kind in enumerate(kinds)
    ]


def run_real(path: Path, requests: list[InferRequest], **options: Any) -> tuple[dict[str, Any], EngineStats]:
    from llmbackend.engine.model.module_runner import make_model_runner  # most tests here do without

    config = EngineConfig(model=str(path), load_format="dummy", transport="inline", block_size=8, **options)
    core = EngineCore(config, make_model_runner(config))
    outcomes, stats = run_counted(core, requests)
    core.close()
    return outcomes.of, stats


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_gives_the_same_tokens_and_logprobs(dtype: str, tmp_path: Path) -> None:
    import transformers as tf  # most tests here do without

    tf.Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.1,
    ).save_pretrained(tmp_path)
    plain, _ = run_real(tmp_path, real_requests(), dtype=dtype)
    for options in ({}, {"num_kv_blocks": 14, "max_num_batched_tokens": 9}):
        fast, stats = run_real(tmp_path, real_requests(), dtype=dtype, speculative_config=EAGER, **options)
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        assert fast == plain
