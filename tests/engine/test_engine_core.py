"""The core with the mock model: the same tokens under every option, and nothing lost in any order of events."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import AdapterLoad, InferRequest, StepOutput
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.mock_engine import (
    FaultyRunner,
    Outcomes,
    ends_with_eos,
    expect_oracle,
    make_core,
    make_request,
    random_life,
    random_requests,
    run_to_end,
)
from tests.helpers.mock_oracle import mock_generate

OPTIONS = list(product([1, 7, 512], [1, 4, 32], [None, 96], [1, 3, 32]))


@pytest.mark.parametrize(("budget", "block_size", "pool_tokens", "max_num_seqs"), OPTIONS)
def test_options_do_not_change_results(
    budget: int, block_size: int, pool_tokens: int | None, max_num_seqs: int
) -> None:
    requests = random_requests(seed=5, count=10)
    core = make_core(
        block_size=block_size,
        num_kv_blocks=pool_tokens and pool_tokens // block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=128,
    )
    outcomes = run_to_end(core, requests)
    for request in requests:
        expect_oracle(outcomes[request.request_id], request)


def test_a_small_pool_forces_preemption_and_the_tokens_stay() -> None:
    requests = random_requests(seed=6, count=30)
    core = make_core(block_size=4, num_kv_blocks=24, max_num_seqs=16, max_num_batched_tokens=32)
    outcomes = Outcomes()
    for request in requests:
        core.add(request)
    while core.has_work:
        stats = outcomes.add(core.step()).stats
    assert stats.num_preemptions > 5
    for request in requests:
        expect_oracle(outcomes[request.request_id], request)


def test_a_request_does_not_depend_on_its_company() -> None:
    requests = random_requests(seed=7, count=12)
    for request in requests:
        expect_oracle(run_to_end(make_core(num_kv_blocks=50), [request])[request.request_id], request)


@pytest.mark.parametrize("kept", [0.2, 0.5, 1.0])
def test_a_request_resumes_after_the_tokens_it_already_gave(kept: float) -> None:
    requests = random_requests(seed=8, count=12)
    resumed, whole = [], {}
    for request in requests:
        whole[request.request_id] = mock_generate(request)
        output = whole[request.request_id].token_ids
        resumed.append(msgspec.structs.replace(request, output_token_ids=output[: int(len(output) * kept)]))
    outcomes = run_to_end(make_core(block_size=4, num_kv_blocks=40, max_num_batched_tokens=16), resumed)
    for request in resumed:
        outcome, expected = outcomes[request.request_id], whole[request.request_id]
        assert request.output_token_ids + outcome.token_ids == expected.token_ids
        assert outcome.finish_reason == expected.finish_reason
        expect_oracle(outcome, request)


# --- how a request ends -----------------------------------------------------------------------------------------------


def run_one(request: InferRequest, **arguments: Any) -> tuple[tuple[int, ...], str | None]:
    outcome = run_to_end(make_core(**arguments), [request])[request.request_id]
    return outcome.token_ids, outcome.finish_reason


def with_sampling(request: InferRequest, **changes: object) -> InferRequest:
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **changes))


def test_the_end_of_sequence_stops_and_is_part_of_the_output() -> None:
    token_ids, reason = run_one(ends_with_eos())
    assert reason == "stop"
    assert token_ids[-1] == 257


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    token_ids, reason = run_one(with_sampling(ends_with_eos(), ignore_eos=True))
    assert reason == "length"
    assert len(token_ids) == 100
    assert 257 in token_ids


def test_min_tokens_holds_the_end_back() -> None:
    request = ends_with_eos()
    length = len(run_one(request)[0])
    token_ids, _ = run_one(with_sampling(request, min_tokens=length))
    assert len(token_ids) > length
    assert 257 not in token_ids[:length]


def test_a_resumed_request_ends_at_once_only_if_it_was_over() -> None:
    request = msgspec.structs.replace(make_request("r", max_tokens=6), output_token_ids=(257,))
    assert run_one(request) == ((), "stop")
    assert run_one(with_sampling(request, ignore_eos=True, max_tokens=1)) == ((), "length")
    goes_on = with_sampling(request, min_tokens=3)
    expect_oracle(run_to_end(make_core(), [goes_on])["r"], goes_on)
    assert len(run_one(goes_on)[0]) >= 3


def test_a_stop_token_stops_where_it_first_appears() -> None:
    request = ends_with_eos()
    plain, _ = run_one(request)
    token_ids, reason = run_one(with_sampling(request, stop_token_ids=(plain[3],)))
    assert reason == "stop"
    assert token_ids == plain[: plain.index(plain[3]) + 1]


def test_max_tokens_is_a_length_finish() -> None:
    token_ids, reason = run_one(with_sampling(ends_with_eos(), max_tokens=3))
    assert (len(token_ids), reason) == (3, "length")


def test_max_tokens_is_cut_to_what_the_model_length_leaves() -> None:
    request = make_request("r", range(10), max_tokens=1000, ignore_eos=True)
    token_ids, reason = run_one(request, max_model_len=16)
    assert (len(token_ids), reason) == (6, "length")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("r", ()), "prompt_token_ids is empty"),
        (make_request("r", range(16)), "prompt_token_ids has 16 tokens, expected at most 15 (max_model_len 16"),
        (make_request("r", max_tokens=-1), "max_tokens is -1, expected at least 0"),
        (make_request("r", (1, 259)), "token id 259 is outside the vocabulary, expected 0 to 258"),
        (make_request("r", (1, -1)), "token id -1 is outside the vocabulary"),
        (make_request("r", range(13)), "have 13 tokens, expected at most 12, the engine's whole KV cache"),
    ],
)
def test_an_impossible_request_is_refused_by_name(request_: InferRequest, message: str) -> None:
    core = make_core(max_model_len=16, block_size=4, num_kv_blocks=3)
    good = make_request("good", max_tokens=2)
    outcomes = run_to_end(core, [request_, good])
    assert outcomes["r"].finish_reason == "error"
    assert message in outcomes["r"].error
    expect_oracle(outcomes["good"], good)


def test_a_request_that_its_own_fields_end_is_its_clients_error() -> None:
    core = make_core(FaultyRunner, max_model_len=64, block_size=4, num_kv_blocks=8)
    outputs: dict[str, StepOutput] = {}
    requests = {
        "too long": make_request("too long", range(64)),
        "refused by the runner": make_request("refused by the runner", logit_bias={9999: 1.0}),
        "outgrows the memory": make_request("outgrows the memory", range(8), max_tokens=50, ignore_eos=True),
        "fails": make_request("fails", (FaultyRunner.POISON, 1)),
    }
    for request in requests.values():
        core.add(request)
        while core.has_work:
            outputs |= {output.request_id: output for output in core.step().outputs if output.finish_reason}
            core.check()
    assert {output.finish_reason for output in outputs.values()} == {"error"}
    assert [outputs[name].is_bad_input for name in requests] == [True, True, True, False]


def test_a_request_that_outgrows_the_pool_keeps_its_tokens_and_ends_with_an_error() -> None:
    request = make_request("big", range(8), max_tokens=100, ignore_eos=True)
    other = make_request("other", (5,), max_tokens=3)
    outcomes = run_to_end(make_core(block_size=4, num_kv_blocks=4), [request, other])
    assert outcomes["big"].finish_reason == "error"
    assert "KV blocks" in outcomes["big"].error
    assert outcomes["big"].token_ids == mock_generate(request).token_ids[:9]
    expect_oracle(outcomes["other"], other)


def test_a_live_id_cannot_be_added_again() -> None:
    core = make_core()
    core.add(make_request("r"))
    with pytest.raises(ValueError, match="'r' is already running"):
        core.add(make_request("r"))


# --- one request never harms another ----------------------------------------------------------------------------------


def test_a_row_that_makes_the_model_raise_ends_alone() -> None:
    good = random_requests(seed=9, count=6)
    bad = make_request("bad", (FaultyRunner.POISON, 1))
    good = [r for r in good if r.prompt_token_ids[0] not in (FaultyRunner.POISON, FaultyRunner.NAN)]
    outcomes = run_to_end(make_core(FaultyRunner, max_num_batched_tokens=16), [good[0], bad, *good[1:]])
    assert outcomes["bad"].finish_reason == "error"
    assert outcomes["bad"].error == "the engine failed on this request: ArithmeticError: poisoned"
    for request in good:
        expect_oracle(outcomes[request.request_id], request)


def test_a_row_with_an_error_of_its_own_ends_and_the_step_goes_on() -> None:
    bad = make_request("bad", (FaultyRunner.NAN, 1))
    good = make_request("good")
    outcomes = run_to_end(make_core(FaultyRunner), [bad, good])
    assert (outcomes["bad"].token_ids, outcomes["bad"].error) == ((), "its logits are not numbers")
    expect_oracle(outcomes["good"], good)


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_abort_in_every_state() -> None:
    core = make_core(block_size=4, num_kv_blocks=7, max_num_seqs=3, max_num_batched_tokens=32)
    outcomes = Outcomes()
    for i, (name, length) in enumerate((("first", 8), ("second", 8), ("third", 7), ("queued", 4))):
        core.add(make_request(name, (100 + i, *range(1, length)), max_tokens=50, ignore_eos=True))
    core.abort("queued")
    for _ in range(3):
        stats = outcomes.add(core.step()).stats
    assert stats.num_preemptions, "one of them is preempted"
    for name in ("third", "second", "first"):
        core.abort(name)
        core.check()
    assert outcomes.add(core.step()).stats.num_free_blocks == 7
    assert {outcomes[name].finish_reason for name in outcomes.of} == {"abort"}
    assert len(outcomes.of) == 4
    assert not core.has_work
    core.abort("first")
    assert not core.has_work, "an id that has ended is no news"


def test_conservation_under_random_submits_aborts_and_steps() -> None:
    """Free + held blocks = all after every move; every request ends once, and survivors with the right tokens."""
    draw = np.random.default_rng(11)
    core = make_core(block_size=4, num_kv_blocks=30, max_num_seqs=6, max_num_batched_tokens=24)
    requests = {request.request_id: request for request in random_requests(seed=11, count=60)}
    outcomes, aborted = random_life(core, draw, [*requests.values()])
    for name, request in requests.items():
        if outcomes[name].finish_reason == "abort":
            assert name in aborted
            expected = mock_generate(request).token_ids
            assert outcomes[name].token_ids == expected[: len(outcomes[name].token_ids)]
        else:
            expect_oracle(outcomes[name], request)


def test_statistics_count_what_happened() -> None:
    core = make_core(num_kv_blocks=50)
    requests = [make_request(str(i), range(5), max_tokens=4, ignore_eos=True) for i in range(3)]
    for request in requests:
        core.add(request)
    stats = core.step().stats
    assert (stats.num_requests_running, stats.num_requests_waiting) == (3, 0)
    assert stats.num_free_blocks == 47
    assert stats.kv_cache_usage == pytest.approx(3 / 50)
    while core.has_work:
        stats = core.step().stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.num_steps) == (15, 12, 4)
    assert stats.num_requests_running == 0


def test_the_mock_model_needs_no_torch() -> None:
    runner = make_runner(EngineConfig(model="mock", num_kv_blocks=4))
    assert isinstance(runner, MockRunner)
    assert runner.info.num_blocks == 4


class SlowAdapters:
    """Reading `slow` takes until the test says so."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.names: set[str] = set()

    def read(self, name: str, path: str) -> str:
        assert name != "slow" or self.gate.wait(20)
        return name

    def add(self, name: str, matrices: str) -> None:
        self.names.add(matrices)

    def remove(self, name: str) -> None:
        self.names.discard(name)


class AdaptingMock(MockRunner):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.adapters = SlowAdapters()


def test_a_request_held_for_its_adapter_counts_as_waiting_and_keeps_its_place() -> None:
    runner = AdaptingMock(EngineConfig(model="mock"))
    core = EngineCore(EngineConfig(model="mock", max_num_seqs=1), runner)
    core.adapters.load(AdapterLoad("slow", "anywhere"))
    core.add(make_request("running", max_tokens=20, ignore_eos=True))
    core.add(msgspec.structs.replace(make_request("held"), lora_name="slow"))
    core.add(make_request("later"))
    stats = core.step().stats
    assert (stats.num_requests_running, stats.num_requests_waiting) == (1, 2)
    runner.adapters.gate.set()
    core.adapters.wait(20)
    assert list(run_to_end(core).of) == ["running", "held", "later"]
    core.close()


def test_a_request_whose_adapter_is_being_read_holds_up_no_other() -> None:
    """As in an engine that follows a dead one, and gets the adapters and the requests of that one at once."""
    runner = AdaptingMock(EngineConfig(model="mock"))
    core = EngineCore(EngineConfig(model="mock"), runner)
    core.adapters.load(AdapterLoad("slow", "anywhere"))
    held = msgspec.structs.replace(make_request("held"), lora_name="slow")
    for request in (held, msgspec.structs.replace(held, request_id="aborted"), make_request("other")):
        core.add(request)
    with pytest.raises(ValueError, match="'held' is already running"):
        core.add(make_request("held", max_tokens=1))
    core.adapters.drop("slow")  # not before its requests have ended
    outcomes = Outcomes()
    core.abort("aborted")
    while "other" not in outcomes.of or outcomes["other"].finish_reason is None:
        outcomes.add(core.step())
    assert set(outcomes.of) == {"other", "aborted"} and core.has_work
    assert outcomes["aborted"].finish_reason == "abort" and not outcomes["aborted"].token_ids
    runner.adapters.gate.set()
    while core.has_work:
        outcomes.add(core.step())
    expect_oracle(outcomes["held"], held)
    core.step()
    assert runner.adapters.names == set()
    core.close()
