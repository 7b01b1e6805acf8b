"""Steps that overlap: at any pace of the device, the results are those of one step at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, StepOutput
from llmbackend.engine.step import OverlappingRunner, RowTable, SampledTokens, StepPlan
from llmbackend.testing.faults import Faults, with_faults
from tests.helpers.mock_devices import FailingDevice, PacedDevice, device_of, devices_closed, make_overlapping
from tests.helpers.mock_engine import (
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

PACE_NAMES = ("fast", "slow", "drawn")
OPTIONS = list(product([1, 7, 512], [1, 4, 32], [None, 96], [1, 3, 32], [False, True]))[::5]
"""Budget, block size, pool in tokens, rows, prefix caching; a fifth of all, with every value of each."""


@pytest.fixture(autouse=True)
def devices_end() -> Iterator[None]:
    with devices_closed():
        yield


def expect_all(outcomes: Outcomes, requests: list[InferRequest]) -> None:
    for request in requests:
        expect_oracle(outcomes[request.request_id], request)


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", range(len(OPTIONS)))
def test_options_do_not_change_results(option: int) -> None:
    """Each with another pace and depth; tokens, logprobs and finish reasons are the oracle's."""
    budget, block_size, pool_tokens, max_num_seqs, caching = OPTIONS[option]
    requests = random_requests(seed=5 + option % 3, count=6)
    core = make_overlapping(
        pace=PACE_NAMES[option % 3],
        in_flight=1 + option % 4,
        block_size=block_size,
        num_kv_blocks=pool_tokens and pool_tokens // block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=128,
        enable_prefix_caching=caching,
    )
    expect_all(run_to_end(core, requests), requests)


@pytest.mark.parametrize(("pace", "in_flight"), [("fast", 2), ("slow", 3), ("drawn", 2)])
def test_a_small_pool_forces_preemption_and_the_tokens_stay(pace: str, in_flight: int) -> None:
    requests = random_requests(seed=6, count=24)
    core = make_overlapping(
        pace=pace, in_flight=in_flight, block_size=4, num_kv_blocks=24, max_num_seqs=16, max_num_batched_tokens=32
    )
    outcomes = run_to_end(core, requests)
    assert core.step().stats.num_preemptions > 5
    expect_all(outcomes, requests)


@pytest.mark.parametrize("kept", [0.2, 0.5, 1.0])
def test_a_request_resumes_after_the_tokens_it_already_gave(kept: float) -> None:
    resumed = []
    for request in random_requests(seed=8, count=12):
        output = mock_generate(request).token_ids
        resumed.append(msgspec.structs.replace(request, output_token_ids=output[: int(len(output) * kept)]))
    core = make_overlapping(block_size=4, num_kv_blocks=40, max_num_batched_tokens=16)
    expect_all(run_to_end(core, resumed), resumed)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_life(seed: int) -> None:
    """Requests that begin alike come and go, with and without priorities, while launches fail; nothing is lost."""
    draw = np.random.default_rng(seed)
    core = make_overlapping(
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
            request,
            prompt_token_ids=(*range(int(draw.choice([0, 4, 9]))), *request.prompt_token_ids),
            priority=int(draw.integers(2)),
        )
        for request in random_requests(seed=seed, count=50)
    ]
    requests = {request.request_id: request for request in wanted}
    device_of(core).not_numbers = {"r7", "r8"}
    device_of(core).poisonous = {"r9"}
    outcomes, aborted = random_life(core, draw, wanted, lambda: setattr(device_of(core), "failures_left", 1))
    assert device_of(core).num_rows == 0
    for name, request in requests.items():
        outcome, expected = outcomes[name], mock_generate(request).token_ids
        if outcome.finish_reason == "abort":
            assert name in aborted
            assert outcome.token_ids == expected[: len(outcome.token_ids)]
        elif outcome.finish_reason == "error":
            assert name in ("r7", "r8", "r9") or "whole KV cache" in outcome.error
        else:
            expect_oracle(outcome, request)


# --- what overlaps ----------------------------------------------------------------------------------------------------


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    core = make_overlapping(in_flight=2)
    core.add(make_request("r", max_tokens=10, ignore_eos=True))
    assert [len(core.step().outputs) for _ in range(3)] == [1, 1, 1]
    assert device_of(core).num_launches == 4
    core.abort("r")
    assert [output.finish_reason for output in core.step().outputs] == ["abort"]
    assert not core.has_work


def test_a_request_that_ends_by_length_is_not_launched_again() -> None:
    request = make_request("r", max_tokens=5, ignore_eos=True)
    core = make_overlapping()
    expect_oracle(run_to_end(core, [request])["r"], request)
    assert device_of(core).num_launches == 5


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_stop_token_wastes_one_slot_for_each_step_behind_it(in_flight: int) -> None:
    request = ends_with_eos()
    core = make_overlapping(in_flight=in_flight)
    outcomes = Outcomes()
    core.add(request)
    while outcomes["eos"].finish_reason is None:
        outcomes.add(core.step())
        core.check()
    expect_oracle(outcomes["eos"], request)
    assert device_of(core).num_launches == len(outcomes["eos"].token_ids) + in_flight - 1
    for _ in range(in_flight - 1):
        assert core.has_work, "a step is in flight that no request needs any more"
        assert core.step().outputs == ()
        core.check()
    assert not core.has_work


def test_a_row_is_given_to_another_while_its_last_step_is_in_flight() -> None:
    """The late result belongs to no request, though the row has a new one, and the new one's tokens are its own."""
    first, second = ends_with_eos(), make_request("next", (9, 8, 7), max_tokens=20, logprobs=2)
    core = make_overlapping(max_num_seqs=1, block_size=4, num_kv_blocks=20)
    outcomes = run_to_end(core, [first, second])
    expect_all(outcomes, [first, second])
    core = make_overlapping(max_num_seqs=1, block_size=4, num_kv_blocks=20)
    core.add(make_request("gone", (1, 2, 3), max_tokens=50, ignore_eos=True, logprobs=1))
    core.step()
    core.abort("gone")
    expect_all(run_to_end(core, [second]), [second])


def test_a_request_that_fills_the_whole_pool_ends_as_without_overlap() -> None:
    """It is not refused for a block that it would need if it had not ended in the step in flight."""
    whole = ends_with_eos()
    num_tokens = 1 + len(mock_generate(whole).token_ids)
    for num_blocks in (num_tokens - 1, num_tokens - 2):
        arguments: dict[str, Any] = {"block_size": 1, "num_kv_blocks": num_blocks}
        alone, ahead = (run_to_end(core, [whole]) for core in (make_core(**arguments), make_overlapping(**arguments)))
        assert ahead.of == alone.of
    assert "whole KV cache" in ahead["eos"].error


def test_no_request_is_preempted_for_blocks_that_a_step_in_flight_gives_back() -> None:
    core = make_overlapping(block_size=4, num_kv_blocks=4, max_num_batched_tokens=32)
    requests = [make_request("short", range(8), max_tokens=1), make_request("long", range(50, 57), max_tokens=9)]
    outcomes = run_to_end(core, requests)
    expect_all(outcomes, requests)
    assert core.step().stats.num_preemptions == 0


def test_only_what_is_read_is_found_in_the_prefix_cache() -> None:
    """A block is full when its last token is computed, and found when that step is committed."""
    core = make_overlapping(block_size=4, num_kv_blocks=64, in_flight=3)
    core.add(make_request("first", range(7), max_tokens=30, ignore_eos=True))
    registered: list[int] = []
    for step in range(12):
        core.step()
        registered.append(len(core._kv_cache._prefixes))
        tokens = np.frombuffer(b"".join(filter(None, map(core._kv_cache._prefixes.tokens_of, range(64)))), np.int32)
        assert (tokens >= 0).all(), "a token that was not read yet is registered"
        assert registered[step] == (7 + step) // 4
    core.abort("first")


def test_a_crowd_computes_what_it_shares_once() -> None:
    """Though those that come at once find nothing before the first one's step is read, and that one is over by then."""
    core = make_overlapping(block_size=4, num_kv_blocks=128, max_num_seqs=16)
    crowd = [make_request(f"r{i}", (*range(20), 100 + i, 7), max_tokens=1) for i in range(16)]
    outputs: list[StepOutput] = []
    for request in crowd:
        core.add(request)
    while core.has_work:
        outputs += core.step().outputs
    assert [output.num_cached_tokens for output in outputs] == [0] + [20] * 15


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", PACE_NAMES)
def test_a_launch_that_fails_waits_for_what_is_in_flight_and_runs_row_by_row(pace: str) -> None:
    requests = random_requests(seed=9, count=6)
    core = make_overlapping(FailingDevice, pace=pace, max_num_batched_tokens=16)
    outcomes = Outcomes()
    for request in requests:
        core.add(request)
    for _ in range(4):
        outcomes.add(core.step())
        device_of(core).failures_left = 1
    while core.has_work:
        outcomes.add(core.step())
        core.check()
    expect_all(outcomes, requests)


def test_a_row_that_no_step_survives_ends_alone() -> None:
    good, bad = random_requests(seed=9, count=6), make_request("bad", (200, 1))
    core = make_overlapping(FailingDevice, max_num_batched_tokens=16)
    device_of(core).poisonous = {"bad"}
    outcomes = run_to_end(core, [good[0], bad, *good[1:]])
    assert outcomes["bad"].error == "the engine failed on this request: ArithmeticError: poisonous"
    expect_all(outcomes, good)


def test_a_row_that_breaks_while_its_next_step_is_in_flight_ends_once() -> None:
    """Its error ends it, the step behind is dropped, nothing of it is found, and its neighbours notice nothing."""
    core = make_overlapping(FailingDevice, block_size=4, num_kv_blocks=64)
    good, bad = make_request("good", range(9), max_tokens=20), make_request("bad", range(50, 62), max_tokens=20)
    outcomes = Outcomes()
    core.add(bad)
    core.add(good)
    outcomes.add(core.step())
    device_of(core).not_numbers = {"bad"}
    while core.has_work:
        outcomes.add(core.step())
        core.check()
    assert outcomes["bad"].error == FailingDevice.error
    assert outcomes["bad"].token_ids == mock_generate(bad).token_ids[: len(outcomes["bad"].token_ids)]
    expect_oracle(outcomes["good"], good)
    core.add(msgspec.structs.replace(bad, request_id="again"))
    assert [output.num_cached_tokens for output in core.step().outputs] == [0]
    core.abort("again")
    core.step()


class LosesSteps(PacedDevice):
    def collect(self) -> tuple[int, SampledTokens]:
        super().collect()
        raise RuntimeError("the device is gone")


class MixesSteps(PacedDevice):
    def collect(self) -> tuple[int, SampledTokens]:
        step_id, sampled = super().collect()
        return step_id + 1, sampled


@pytest.mark.parametrize(
    ("runner", "message"),
    [(LosesSteps, "the device is gone"), (MixesSteps, "1 tokens of step 2, expected 1 tokens of step 1")],
)
def test_a_step_that_cannot_be_read_ends_the_engine(runner: type[PacedDevice], message: str) -> None:
    core = make_overlapping(runner)
    core.add(make_request("r"))
    with pytest.raises(RuntimeError, match=message):
        core.step()


# --- when steps overlap -----------------------------------------------------------------------------------------------


def test_steps_are_read_one_by_one_where_that_is_asked_for() -> None:
    requests = random_requests(seed=3, count=8)
    core = make_overlapping(async_scheduling=False)
    expect_all(run_to_end(core, requests), requests)
    assert device_of(core).num_launches == 0


def test_a_runner_whose_steps_do_not_overlap_has_none_in_flight_between_steps() -> None:
    core = make_core(async_scheduling=True)
    core.add(make_request("r", max_tokens=4, ignore_eos=True))
    for _ in range(4):
        (output,) = core.step().outputs
        assert len(output.token_ids) == 1
        assert not core._in_flight


def test_faults_keep_the_kind_of_a_runner() -> None:
    for steps, overlaps in ((0, False), (2, True)):
        config = EngineConfig(model="mock", mock_steps_in_flight=steps, fault_directory="/nowhere")
        assert isinstance(make_runner(config), OverlappingRunner) is overlaps
    assert not isinstance(with_faults(make_core()._runner, Faults("/nowhere")), OverlappingRunner)


def test_the_hosts_share_of_a_step_is_what_the_device_waited() -> None:
    """A device that never waits has nothing of the host's in its steps, and one step at a time has all of it."""

    class Clocked(PacedDevice):
        def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
            return msgspec_replace(super().execute(plan, table), forward_s=0.0)

        def collect(self) -> tuple[int, SampledTokens]:
            step_id, sampled = super().collect()
            return step_id, msgspec_replace(sampled, forward_s=1e9)

    shares = []
    for is_async in (True, False):
        core = make_overlapping(Clocked, async_scheduling=is_async)
        core.add(make_request("r", max_tokens=4, ignore_eos=True))
        shares.append([core.step().stats.last_host_s for _ in range(4)])
    assert shares[0] == [0.0] * 4
    assert all(share > 0 for share in shares[1])


def msgspec_replace(sampled: SampledTokens, forward_s: float) -> SampledTokens:
    return SampledTokens(sampled.token_ids, sampled.logprobs, sampled.errors, forward_s=forward_s)


def test_an_early_end_of_offline_generation_leaves_nothing_in_flight() -> None:
    from llmbackend.engine.offline import OfflineEngine

    with OfflineEngine(EngineConfig(model="mock", mock_steps_in_flight=3)) as engine:
        for result in engine.generate([make_request("r", max_tokens=50, ignore_eos=True)]):
            assert result.outputs
            break
        core: EngineCore = engine._core
        assert not core.has_work
        core.check()
