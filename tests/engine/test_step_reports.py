"""What a watched engine reports of its steps and blocks, and that watching changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from llmbackend.engine.config import SpeculativeConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.messages import InferRequest, StepResult
from llmbackend.engine.reports import BlockMap, RowReport, StepReport, Watch
from llmbackend.engine.scheduling import step_reporter
from tests.helpers.mock_devices import devices_closed, make_overlapping
from tests.helpers.mock_engine import Outcomes, expect_oracle, make_core, make_request, random_requests

ALL = Watch(steps=True, blocks=True)
STEPS = Watch(steps=True)


class Watched:
    """A run of a watched core."""

    def __init__(self, core: EngineCore, watch: Watch = STEPS) -> None:
        self.core = core
        self.outcomes = Outcomes()
        self.steps: list[StepReport] = []
        self.maps: list[BlockMap] = []
        core.watch(watch)

    def run(self, *requests: InferRequest, num_steps: int = 10_000) -> Watched:
        for request in requests:
            self.core.add(request)
        while self.core.has_work and num_steps:
            self.take(self.core.step())
            num_steps -= 1
        return self

    def take(self, result: StepResult) -> None:
        self.outcomes.add(result)
        if result.report is not None and result.report.step is not None:
            self.steps.append(result.report.step)
        if result.report is not None and result.report.blocks is not None:
            self.maps.append(result.report.blocks)

    def rows(self, request_id: str) -> list[RowReport]:
        return [row for step in self.steps for row in step.rows if row[0] == request_id]

    @property
    def num_output_tokens(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for step in self.steps:
            for request_id, _, _, _, num_tokens in step.rows:
                found[request_id] += num_tokens
        return found


def resumed(request: InferRequest, outcomes: Outcomes) -> InferRequest:
    return msgspec.structs.replace(request, output_token_ids=outcomes[request.request_id].token_ids)


def prompt(first: int, length: int) -> list[int]:
    return [first, *range(1, length)]


def test_a_prompt_in_chunks_and_then_its_tokens() -> None:
    watched = Watched(make_core(max_num_batched_tokens=8)).run(make_request("a", prompt(9, 20), ignore_eos=True))
    chunks = [(kind, num_tokens, num_new) for _, kind, num_tokens, _, num_new in watched.rows("a")]
    assert chunks == [("prefill", 8, 0), ("prefill", 8, 0), ("prefill", 4, 1)] + [("decode", 1, 1)] * 7


def test_the_last_token_of_a_prompt_is_a_part_of_it() -> None:
    watched = Watched(make_core(max_num_batched_tokens=4)).run(make_request("a", prompt(9, 5), max_tokens=2))
    assert [row[1:3] for row in watched.rows("a")][:2] == [("prefill", 4), ("prefill", 1)]


@pytest.mark.parametrize("seed", range(3))
def test_the_reports_count_the_tokens_that_requests_got(seed: int) -> None:
    requests = random_requests(seed, 20)
    watched = Watched(make_core(block_size=4, num_kv_blocks=40, max_num_batched_tokens=24)).run(*requests)
    for request in requests:
        expect_oracle(watched.outcomes[request.request_id], request)
        assert watched.num_output_tokens[request.request_id] == len(watched.outcomes[request.request_id].token_ids)
    last = watched.steps[-1]
    assert (last.num_running, last.waiting) == (0, ())
    assert last.num_free_blocks + last.num_cached_blocks == last.num_blocks == 40


def test_what_is_preempted_waits_for_blocks_and_is_computed_again() -> None:
    core = make_core(block_size=4, num_kv_blocks=12, max_num_seqs=8, enable_prefix_caching=False)
    requests = [make_request(f"r{i}", prompt(i, 12), max_tokens=20, ignore_eos=True) for i in range(3)]
    watched = Watched(core).run(*requests)
    preempted = [request_id for step in watched.steps for request_id in step.preempted]
    assert preempted
    victim = preempted[0]
    at = next(i for i, step in enumerate(watched.steps) if victim in step.preempted)
    assert (victim, "kv_blocks") in watched.steps[at].waiting
    again = [row[1] for step in watched.steps[at:] for row in step.rows if row[0] == victim]
    assert again[0] == "recompute"
    assert again[-1] == "decode"
    assert "prefill" not in again


def test_a_request_of_a_dead_engine_is_computed_again_and_then_goes_on() -> None:
    request = make_request("a", prompt(9, 6), max_tokens=12, ignore_eos=True)
    first = Watched(make_core()).run(request, num_steps=5)
    second = Watched(make_core(max_num_batched_tokens=4)).run(resumed(request, first.outcomes))
    kinds = [row[1] for row in second.rows("a")]
    assert kinds[: kinds.index("decode")] == ["recompute"] * 3
    assert set(kinds[kinds.index("decode") :]) == {"decode"}


@pytest.mark.parametrize(
    ("arguments", "lengths", "reason"),
    [
        ({"max_num_seqs": 1}, (4, 4), "max_num_seqs"),
        ({"num_kv_blocks": 5, "enable_prefix_caching": False}, (12, 12), "kv_blocks"),
        ({"max_num_batched_tokens": 4}, (12, 12), "token_budget"),
    ],
)
def test_why_a_request_waits(arguments: dict[str, Any], lengths: tuple[int, int], reason: str) -> None:
    requests = [make_request(name, prompt(i, n)) for i, (name, n) in enumerate(zip("ab", lengths, strict=True))]
    watched = Watched(make_core(block_size=4, **arguments)).run(*requests)
    assert watched.steps[0].waiting == (("b", reason),)
    assert watched.steps[-1].waiting == ()


def test_a_long_prompt_waits_for_another_one() -> None:
    core = make_core(max_num_batched_tokens=16, long_prefill_token_threshold=10)
    lengths = {"a": 40, "b": 40, "short": 3}
    watched = Watched(core).run(*(make_request(name, prompt(i, n)) for i, (name, n) in enumerate(lengths.items())))
    assert [row[0] for row in watched.steps[0].rows] == ["a", "short"]
    assert watched.steps[0].waiting == (("b", "long_prefill"),)


def test_a_request_waits_for_the_beginning_that_another_one_computes() -> None:
    requests = [make_request(name, prompt(7, 24), max_tokens=2) for name in "ab"]
    watched = Watched(make_core(block_size=4)).run(*requests)
    assert watched.steps[0].waiting == (("b", "prefix"),)
    assert watched.rows("b")[0][1:3] == ("prefill", 4)


def test_accepted_drafts() -> None:
    core = make_core(speculative_config=SpeculativeConfig(num_speculative_tokens=4))
    watched = Watched(core)
    result = None
    for request in random_requests(3, 12, max_tokens=60):
        core.add(request)
    while core.has_work:
        result = core.step()
        watched.take(result)
    assert result is not None
    accepted = sum(row[3] for step in watched.steps for row in step.rows)
    assert accepted <= result.stats.num_accepted_tokens  # those behind the end of a request are not its tokens
    for step in watched.steps:
        assert all(num_new in (0, num_accepted + 1) for _, _, _, num_accepted, num_new in step.rows)


def test_parts_of_a_steps_time() -> None:
    watched = Watched(make_core(mock_step_ms=2)).run(make_request("a", max_tokens=4, ignore_eos=True))
    for step in watched.steps:
        run_s = step.duration_s - step.schedule_s - step.commit_s
        assert step.schedule_s > 0 and step.commit_s > 0
        assert run_s >= 0.002


@pytest.mark.parametrize("pace", ["fast", "slow", "drawn"])
def test_steps_that_overlap(pace: str) -> None:
    """Rows and kinds are those of the launched plans; a watch that begins while steps are in flight misses these."""
    requests = random_requests(4, 10)
    with devices_closed():
        core = make_overlapping(pace=pace, in_flight=2, block_size=4, num_kv_blocks=60, max_num_batched_tokens=16)
        watched = Watched(core, Watch())
        watched.run(*requests, num_steps=6)
        core.watch(STEPS)
        missed = {name: len(outcome.token_ids) for name, outcome in watched.outcomes.of.items()}
        watched.run()
        for request in requests:
            outcome = watched.outcomes[request.request_id]
            expect_oracle(outcome, request)
            seen = watched.num_output_tokens[request.request_id]
            assert len(outcome.token_ids) - missed.get(request.request_id, 0) - seen in (0, 1, 2)


def test_nothing_is_reported_that_nobody_watches() -> None:
    watched = Watched(make_core(), Watch())
    watched.run(make_request("a"))
    assert (watched.steps, watched.maps) == ([], [])
    watched.core.watch(STEPS)
    watched.run(make_request("b"))
    num_steps = len(watched.steps)
    assert num_steps
    watched.core.watch(Watch())
    watched.run(make_request("c"))
    assert len(watched.steps) == num_steps


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_the_map_of_an_idle_engine_comes_at_once() -> None:
    watched = Watched(make_core(num_kv_blocks=9), Watch(blocks=True)).run()
    assert [one.runs for one in watched.maps] == [((0, 9, "free", None, 0),)]
    watched.core.watch(Watch(blocks=True))  # for another viewer
    assert len(watched.run().maps) == 2


def test_used_shared_and_cached_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_reporter, "BLOCK_MAP_INTERVAL_S", 0.0)
    core = make_core(block_size=4, num_kv_blocks=20)
    watched = Watched(core, ALL).run(make_request("a", prompt(7, 9), ignore_eos=True), num_steps=2)
    watched.run(make_request("b", prompt(7, 9), ignore_eos=True), num_steps=1)
    shared = [run for run in watched.maps[-1].runs if run[4] == 2]
    assert sum(run[1] for run in shared) == 2
    assert {run[2] for run in shared} == {"used"}
    watched.run()
    last = watched.maps[-1]
    counts: Counter[str] = Counter()
    for _, count, state, request_id, references in last.runs:
        counts[state] += count
        assert (request_id, references) == (None, 0)
    assert counts == {"cached": watched.steps[-1].num_cached_blocks, "free": watched.steps[-1].num_free_blocks}


def test_maps_are_seldom_but_the_last_state_is_told() -> None:
    watched = Watched(make_core(num_kv_blocks=64), Watch(blocks=True))
    watched.run(*(make_request(f"r{i}", prompt(i, 9), max_tokens=60, ignore_eos=True) for i in range(4)))
    assert len(watched.maps) < 20
    assert all(run[3] is None for run in watched.maps[-1].runs)


def test_a_map_of_many_runs_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_reporter, "MAX_BLOCK_RUNS", 2)
    core = make_core(block_size=4, num_kv_blocks=40)
    core.watch(Watch(blocks=True))
    for i in range(4):
        core.add(make_request(f"r{i}", prompt(i, 9), ignore_eos=True))
    report = core.step().report
    assert report is not None and report.blocks is not None
    assert (len(report.blocks.runs), report.blocks.is_truncated) == (2, True)
    while core.has_work:
        core.step()
