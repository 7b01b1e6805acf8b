"""Logprobs of prompts, and max_tokens 0: the same however a prompt is cut, shared, preempted or taken up again."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import InferRequest, TokenLogprobs
from llmbackend.engine.sampling.sampler import PromptSpan, logprobs_of_spans, token_logprobs
from llmbackend.engine.step import BROKEN_LOGITS, RowTable
from llmbackend.testing.mock_model import MockRunner, mock_logits
from llmbackend.testing.overlapping_mock import OverlappingMockRunner
from tests.helpers.mock_engine import Outcomes, expect_oracle, make_core, make_request, run_counted, run_to_end

VOCAB_SIZE = 259
WAYS: dict[str, dict[str, Any]] = {
    "one chunk": {"max_num_batched_tokens": 4096},
    "small chunks": {"max_num_batched_tokens": 7},
    "a token at a time": {"max_num_batched_tokens": 1, "max_num_seqs": 2},
    "no prefix cache": {"enable_prefix_caching": False},
    "preemption": {"num_kv_blocks": 18, "max_num_batched_tokens": 9},
    "steps in flight": {"mock_steps_in_flight": 2, "max_num_batched_tokens": 16},
    "steps in flight, preemption": {"mock_steps_in_flight": 2, "num_kv_blocks": 18, "max_num_batched_tokens": 9},
}


def oracle(request: InferRequest, count: int) -> list[tuple[int, float, int, list[tuple[int, float]]]]:
    """Token, logprob, rank and the likeliest ones, of each token of the prompt but the first."""
    prompt, found = np.array(request.prompt_token_ids, np.int32), []
    for position in range(1, len(prompt)):
        logits = mock_logits(prompt[:position], VOCAB_SIZE)
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.argsort(-logits, kind="stable")[:count].tolist()
        token_id = int(prompt[position])
        rank = 1 + int((logits > logits[token_id]).sum())
        found.append((token_id, float(logprobs[token_id]), rank, [(one, float(logprobs[one])) for one in best]))
    return found


def expect_prompt(entries: tuple[TokenLogprobs, ...], request: InferRequest) -> None:
    count = request.sampling.prompt_logprobs
    assert count is not None
    expected = oracle(request, VOCAB_SIZE if count < 0 else count)
    assert [(one.token_id, one.rank, [i for i, _ in one.top]) for one in entries] == [
        (token_id, rank, [i for i, _ in top]) for token_id, _, rank, top in expected
    ]
    got = [value for one in entries for value in (one.logprob, *(logprob for _, logprob in one.top))]
    want = [value for _, logprob, _, top in expected for value in (logprob, *(one for _, one in top))]
    np.testing.assert_allclose(got, want, rtol=1e-9)


def requests() -> list[InferRequest]:
    """Prompts that begin alike, with and without logprobs, long and short, and some that are all there is."""
    text = list(np.random.default_rng(1).integers(0, 256, 90))
    asked: list[dict[str, Any]] = [
        {"prompt_logprobs": 2}, {}, {"prompt_logprobs": 0, "max_tokens": 0}, {"prompt_logprobs": 1, "logprobs": 1},
        {"max_tokens": 0}, {"prompt_logprobs": -1, "max_tokens": 3},
    ]  # fmt: skip
    return [
        make_request(f"r{i}", map(int, text[: 90 - 11 * (i % 5)]), **{"max_tokens": 40, "ignore_eos": True} | one)
        for i, one in enumerate(asked * 2)
    ]


def core_of(**arguments: Any) -> EngineCore:
    runner = OverlappingMockRunner if "mock_steps_in_flight" in arguments else MockRunner
    return make_core(runner, block_size=8, max_model_len=256, **arguments)


@pytest.mark.parametrize("way", WAYS)
def test_they_depend_on_the_prompt_alone(way: str) -> None:
    core = core_of(**WAYS[way])
    outcomes, stats = run_counted(core, requests())
    for request in requests():
        outcome = outcomes[request.request_id]
        expect_oracle(outcome, request)
        if request.sampling.prompt_logprobs is None:
            assert outcome.prompt_logprobs == ()
        else:
            expect_prompt(outcome.prompt_logprobs, request)
    assert ("preemption" in way) == (stats.num_preemptions > 0)
    core.close()


@pytest.mark.parametrize("num_known", [0, 1, 20, 88, 89])
def test_an_engine_goes_on_behind_those_that_another_one_sent(num_known: int) -> None:
    request = requests()[0]
    whole = run_to_end(core_of(), [request])[request.request_id]
    resumed = msgspec.structs.replace(request, num_prompt_logprobs=num_known)
    rest = run_to_end(core_of(max_num_batched_tokens=10), [resumed])[request.request_id]
    assert rest.prompt_logprobs == whole.prompt_logprobs[num_known:]
    assert rest.token_ids == whole.token_ids


def test_all_known_ones_make_the_prefix_cache_count_again() -> None:
    core, request = core_of(), requests()[0]
    run_to_end(core, [request])
    again = msgspec.structs.replace(request, request_id="again")
    known = msgspec.structs.replace(request, request_id="known", num_prompt_logprobs=len(request.prompt_token_ids) - 1)
    _, stats = run_counted(core, [again])
    assert stats.prefix_cache_hits == 0
    _, stats = run_counted(core, [known])
    assert stats.prefix_cache_hits == 88


def test_a_prompt_of_one_token_has_none() -> None:
    outcome = run_to_end(core_of(), [make_request("r", (5,), prompt_logprobs=3)])["r"]
    assert outcome.prompt_logprobs == () and len(outcome.token_ids) == 8


def test_max_tokens_0_ends_with_the_prompt() -> None:
    outcome = run_to_end(core_of(max_num_batched_tokens=8), [make_request("r", range(30), max_tokens=0)])["r"]
    assert (outcome.token_ids, outcome.finish_reason) == ((), "length")


def test_an_abort_in_the_middle_of_a_prompt() -> None:
    core, outcomes = core_of(max_num_batched_tokens=16), Outcomes()
    one, other = requests()[0], requests()[3]
    core.add(one)
    outcomes.add(core.step())
    core.abort(one.request_id)
    core.add(other)
    while core.has_work:
        outcomes.add(core.step())
        core.check()
    assert outcomes[one.request_id].finish_reason == "abort"
    expect_prompt(outcomes[other.request_id].prompt_logprobs, other)


@pytest.mark.parametrize("count", [0, 1, 5, 7, 8, 511, 512])
def test_logprobs_from_logits(count: int) -> None:
    logits = np.random.default_rng(3).normal(size=512).round(1).astype(np.float32)  # rounded: many are equal
    found = token_logprobs(logits, 7, count)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    order = sorted(range(512), key=lambda i: (-logits[i], i))[:count]
    assert [token_id for token_id, _ in found.top] == order
    np.testing.assert_allclose([logprob for _, logprob in found.top], exact[order], rtol=1e-5)
    np.testing.assert_allclose(found.logprob, exact[7], rtol=1e-5)
    assert found.rank == 1 + int((logits > logits[7]).sum())


def test_an_excluded_token_is_impossible_and_broken_logits_are_an_error() -> None:
    """As in samples: only the largest logit must be finite."""
    table = RowTable(5, 16, 16)
    table.token_ids[:, 1] = 7
    logits = np.tile(np.linspace(-3, 3, 512, dtype=np.float32), (5, 1))
    logits[[0, 1, 2], 7] = -np.inf, np.nan, np.inf
    logits[3] = -np.inf
    spans = [PromptSpan(row, first=1, end=2, count=2) for row in range(5)]
    found, errors = logprobs_of_spans(spans, table, lambda row, positions: logits[row][None])
    assert errors == dict.fromkeys((1, 2, 3), BROKEN_LOGITS)
    [excluded], [usual] = found[0], found[4]
    assert (excluded.logprob, excluded.rank) == (-np.inf, 512)
    assert [token_id for token_id, _ in excluded.top] == [511, 510] and usual.logprob > -np.inf
