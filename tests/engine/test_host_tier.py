"""Host memory for KV blocks: what the device has no room for is found there, copied back, and no token changes by it.

The mock model reads a request's tokens back from its KV slots and spoils what a block was copied from, so that a lost,
late or wrong copy would change the tokens; `expect_oracle` compares them with those that the request gives alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.memory.host_tier import HostTier
from llmbackend.engine.memory.prefix_cache import PrefixCache
from llmbackend.engine.messages import InferRequest
from llmbackend.engine.step import KVCopies, RowTable, SampledTokens, StepPlan
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.mock_devices import FailingDevice, device_of, devices_closed, make_overlapping
from tests.helpers.mock_engine import Outcomes, expect_oracle, make_core, make_request, random_requests, run_to_end
from tests.helpers.mock_oracle import mock_generate

BLOCK = 4


@pytest.fixture(autouse=True)
def devices_end() -> Iterator[None]:
    with devices_closed():
        yield


@pytest.fixture(params=["plain", "overlapping"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: str, **arguments: Any) -> EngineCore:
    arguments = {"block_size": BLOCK, "num_kv_blocks": 12, "max_num_seqs": 8, "num_host_kv_blocks": 40, **arguments}
    return make_core(**arguments) if kind == "plain" else make_overlapping(**arguments)


def text(start: int, num_blocks: int = 5) -> tuple[int, ...]:
    return tuple(range(start, start + num_blocks * BLOCK))


def cached_tokens(core: EngineCore, request: InferRequest) -> int:
    """Runs one request to its end; how many of its tokens were found. Its tokens are the oracle's."""
    core.add(request)
    outcomes, found = Outcomes(), -1
    while core.has_work:
        for output in outcomes.add(core.step()).outputs:
            found = output.num_cached_tokens
        core.check()
    expect_oracle(outcomes[request.request_id], request)
    return found


def ask(core: EngineCore, start: int, last: int) -> int:
    return cached_tokens(core, make_request(f"{start} {last}", (*text(start), last), max_tokens=1))


# --- what is found ----------------------------------------------------------------------------------------------------


def test_texts_that_the_device_has_no_room_for_are_found_on_the_host(kind: str) -> None:
    core = make(kind)
    for start in (0, 40, 80, 120):
        assert ask(core, start, 1) == 0
    assert [ask(core, start, 2) for start in (0, 40, 80, 120)] == [20] * 4
    stats = core.step().stats
    assert stats.num_reloaded_blocks > 5
    core = make(kind, num_host_kv_blocks=0)
    for start in (0, 40, 80, 120):
        ask(core, start, 1)
    assert ask(core, 0, 2) == 0, "without host memory it is gone"


def test_the_longest_unused_text_is_given_up_from_its_end_on(kind: str) -> None:
    core = make(kind, num_host_kv_blocks=7)
    for start in (0, 40, 80, 120):
        ask(core, start, 1)
    # 20 blocks of text; 11 or 12 stay on the device, of the others the host keeps the last 7 that it was given.
    assert len(core._kv_cache.host_tier._kept) == 7
    assert ask(core, 0, 2) < 20
    assert ask(core, 120, 2) == 20


def test_one_text_partly_here_and_partly_there(kind: str) -> None:
    """Its end is on the host, its beginning on the device, and taking it makes room for itself."""
    core = make(kind, num_kv_blocks=8)
    ask(core, 0, 1)
    cached_tokens(core, make_request("other", text(60, 4), max_tokens=1))
    held = core._kv_cache.find(np.array((*text(0), 9), np.int32), ("", "", "")).blocks
    assert min(held) < 8 <= max(held)
    assert ask(core, 0, 2) == 20


def test_a_preempted_request_is_copied_back_and_not_computed_again(kind: str) -> None:
    """With host memory fewer tokens are computed."""
    computed = []
    for num_host_blocks in (0, 40):
        core = make(kind, num_kv_blocks=14, num_host_kv_blocks=num_host_blocks, max_num_batched_tokens=64)
        requests = [make_request(f"r{i}", (i, *range(15)), max_tokens=30, ignore_eos=True) for i in range(4)]
        num_tokens = watch(core)
        outcomes = run_to_end(core, requests)
        for request in requests:
            expect_oracle(outcomes[request.request_id], request)
        assert core.step().stats.num_preemptions > 0
        computed.append(sum(num_tokens))
    assert computed[1] < computed[0]


def watch(core: EngineCore) -> list[int]:
    """The numbers of tokens of the steps that run."""
    scheduler = core._scheduler
    schedule = scheduler.schedule
    num_tokens: list[int] = []

    def noted(in_flight: bool = False) -> Any:
        result = schedule(in_flight)
        if result.plan is not None:
            num_tokens.append(result.plan.num_tokens)
        return result

    scheduler.schedule = noted  # type: ignore[method-assign]
    return num_tokens


def test_what_failed_is_not_kept(kind: str) -> None:
    if kind == "overlapping":
        core = make_overlapping(FailingDevice, block_size=BLOCK, num_kv_blocks=12, num_host_kv_blocks=40)
        device_of(core).not_numbers = {"bad"}
    else:
        core = make_core(FailsOnBad, block_size=BLOCK, num_kv_blocks=12, num_host_kv_blocks=40)
    for start in (0, 40, 80):
        ask(core, start, 1)
    assert run_to_end(core, [make_request("bad", (*text(0), 3))])["bad"].finish_reason == "error"
    assert ask(core, 0, 2) == 0, "what it found may be why it failed"
    assert ask(core, 40, 2) == 20


class FailsOnBad(MockRunner):
    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        sampled = super().execute(plan, table)
        bad = [row for row in plan.rows.tolist() if self._requests[row].request_id == "bad"]
        return SampledTokens(sampled.token_ids, sampled.logprobs, dict.fromkeys(bad, "its logits are not numbers"))


# --- in any order of events -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "num_host_blocks"), [(0, 1), (1, 6), (2, 60), (3, 60)])
def test_tokens_are_those_of_each_request_alone(kind: str, seed: int, num_host_blocks: int) -> None:
    """Texts that begin alike, a small device, aborts, failing launches; all copies are made, each text in one place."""
    draw = np.random.default_rng(seed)
    arguments: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_blocks": 26,
        "num_host_kv_blocks": num_host_blocks,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
    }
    core = make_core(**arguments) if kind == "plain" else make_overlapping(FailingDevice, "drawn", **arguments)
    requests: dict[str, InferRequest] = {}
    outcomes, aborted = Outcomes(), set()
    for i, request in enumerate(random_requests(seed=seed, count=60)):
        start = int(draw.choice([0, 0, 50, 100, 150]))
        prompt = (*text(start, int(draw.integers(1, 9))), *request.prompt_token_ids[: int(draw.integers(1, 6))])
        requests[f"r{i}"] = make_request(f"r{i}", prompt, temperature=0.7, seed=i, max_tokens=int(draw.integers(1, 25)))
        core.add(requests[f"r{i}"])
        for _ in range(int(draw.integers(4))):
            if core.has_work:
                outcomes.add(core.step())
            core.check()
        if draw.random() < 0.1:
            aborted.add(f"r{i // 2}")
            core.abort(f"r{i // 2}")
        if kind == "overlapping" and draw.random() < 0.1:
            device_of(core).failures_left = 1
    while core.has_work:
        stats = outcomes.add(core.step()).stats
        core.check()
    for name, request in requests.items():
        if outcomes[name].finish_reason == "abort":
            assert name in aborted
            assert outcomes[name].token_ids == mock_generate(request).token_ids[: len(outcomes[name].token_ids)]
        else:
            expect_oracle(outcomes[name], request)
    assert stats.num_reloaded_blocks > 0 and stats.num_preemptions > 0


def test_a_copy_that_fails_ends_the_engine(kind: str) -> None:
    """It is made once: a second attempt could not tell whether the first succeeded."""
    core = make(kind)
    for start in (0, 40):
        ask(core, start, 1)

    def fail(copies: KVCopies) -> None:
        raise RuntimeError("the host's memory is gone")

    device_of(core).copy_blocks = fail
    with pytest.raises(RuntimeError, match="the host's memory is gone"):
        ask(core, 80, 1)


# --- the pool alone ---------------------------------------------------------------------------------------------------


def test_copies_come_out_in_order_as_runs_of_one_direction_without_a_target_twice() -> None:
    prefixes = PrefixCache(4 + 1)
    tier = HostTier(prefixes, 4, 1)
    for block, tokens in enumerate((b"aa", b"bb", b"cc")):
        prefixes.register((), tokens, block)
    tier.offload(0)
    tier.offload(1)
    tier.hold([4])
    tier.reload(4, 3)
    tier.offload(2)
    prefixes.check()
    tier.check()
    copies = [(one.to_host, one.blocks.tolist(), one.host_blocks.tolist()) for one in tier.take_copies()]
    assert copies == [(True, [1], [0]), (False, [3], [0]), (True, [2], [0])], "the first text's was given up"
    assert tier.take_copies() == []
    assert [prefixes.find((), text, 2).blocks.tolist() for text in (b"aa", b"bb", b"cc")] == [[], [3], [4]]


def test_a_block_whose_beginning_is_forgotten_is_not_kept() -> None:
    prefixes = PrefixCache(2 + 4)
    tier = HostTier(prefixes, 2, 4)
    prefixes.register(prefixes.register((), b"aa", 0), b"bb", 1)
    prefixes.forget(0)
    tier.offload(1)
    assert (len(prefixes), tier.take_copies()) == (0, [])


def test_a_moved_beginning_still_leads_to_what_comes_after_it() -> None:
    prefixes = PrefixCache(4)
    prefixes.register(prefixes.register((), b"aa", 0), b"bb", 1)
    prefixes.move(0, 3)
    assert prefixes.find((), b"aabb", 2).blocks.tolist() == [3, 1]
    prefixes.check()


# --- what is asked for ------------------------------------------------------------------------------------------------


def test_its_size_is_given_in_gib_or_in_blocks() -> None:
    block_bytes = BLOCK * 4
    config = EngineConfig(model="mock", block_size=BLOCK, kv_offloading_size=10 * block_bytes / 2**30)
    assert MockRunner(config).info.num_host_blocks == 10
    assert MockRunner(EngineConfig(model="mock", num_host_kv_blocks=7)).info.num_host_blocks == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_offloading_size": -1}, "'kv_offloading_size' is -1, expected a number of at least 0"),
        ({"num_host_kv_blocks": -1}, "'num_host_kv_blocks' is -1, expected at least 0"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "expected 'enable_prefix_caching' to be true"),
        ({"kv_offloading_size": 1, "model": "/m", "tensor_parallel_size": 2}, "expected null or 0 if 'tensor_par"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"model": "mock", **arguments})


def test_a_size_below_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="is 1e-12, expected at least 1"):
        MockRunner(EngineConfig(model="mock", kv_offloading_size=1e-12))


def test_a_runner_without_host_memory_is_refused() -> None:
    runner = MockRunner(EngineConfig(model="mock"))
    with pytest.raises(ValueError, match="expected null or 0: this model's runner on 'cpu' does not move KV"):
        EngineCore(EngineConfig(model="mock", num_host_kv_blocks=4), runner)
