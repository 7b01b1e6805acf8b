"""Long prompts beside requests that generate: gaps follow a target, short prompts do not wait, tokens are the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.scheduling import step_pacing
from llmbackend.engine.scheduling.scheduler import Scheduler
from llmbackend.engine.scheduling.step_pacing import MIN_CHUNK_TOKENS, StepPacer, StepWork
from llmbackend.engine.step import RowTable, SampledTokens, StepPlan
from llmbackend.testing.mock_model import MockRunner
from tests.helpers.mock_devices import PacedDevice, devices_closed
from tests.helpers.mock_engine import expect_oracle, make_core, make_request, run_to_end
from tests.helpers.scheduler_harness import Harness

DECODE_S, TOKEN_S, ATTENTION_S = 0.027, 0.0006, 2e-7
"""What a step takes without prompts, and what a prompt's token adds, alone and for each token before it: about what a
model of 125 million parameters takes on two cores."""
MAX_MODEL_LEN = 9000


@dataclass
class Machine:
    """A clock that only computing moves. slowdown: by what each step takes longer, one after the other."""

    now_s: float = 0.0
    slowdown: Callable[[], float] = lambda: 1.0
    row_s: float = 0.0
    """What each row that generates adds."""
    steps_s: list[float] = field(default_factory=list)

    def compute(self, chunks: Sequence[tuple[int, int]]) -> None:
        step_s = DECODE_S + self.row_s * sum(n == 1 for _, n in chunks)
        step_s += sum(n * (TOKEN_S + ATTENTION_S * (start + n / 2)) for start, n in chunks if n > 1)
        self.steps_s.append(step_s * self.slowdown())
        self.now_s += self.steps_s[-1]


class TimedRunner(MockRunner):
    machine: Machine

    def execute(self, plan: StepPlan, table: RowTable) -> SampledTokens:
        starts = table.num_computed_tokens[plan.rows].tolist()
        self.machine.compute(list(zip(starts, plan.num_scheduled_tokens.tolist(), strict=True)))
        return super().execute(plan, table)


def timed_core(machine: Machine, **arguments: Any) -> EngineCore:
    """As a model on CPU is paced."""
    settings: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "model": "mock", **arguments}
    runner = TimedRunner(EngineConfig(**settings))
    runner.machine = machine
    return EngineCore(EngineConfig(**{**settings, "model": "a model"}), runner, lambda: machine.now_s)


def streams(core: EngineCore) -> None:
    """Four requests that generate."""
    for i in range(4):
        core.add(make_request(f"s{i}", (i + 1,) * 10, max_tokens=2000, ignore_eos=True))


def gaps_beside_a_long_prompt(
    core: EngineCore, machine: Machine, prompt_tokens: int = 8000
) -> tuple[float, list[float], int]:
    """The streams' usual gap, their gaps while a long prompt is computed, and how many steps that took."""
    streams(core)
    for _ in range(20):
        core.step()
    usual_s = statistics.median(machine.steps_s[-15:])
    core.add(make_request("long", [i % 250 for i in range(prompt_tokens)], max_tokens=2))
    machine.steps_s.clear()
    while True:
        result = core.step()
        ids = {output.request_id for output in result.outputs if output.token_ids}
        assert {"s0", "s1", "s2", "s3"} <= ids, "a stream got no token in a step"
        if "long" in ids:
            return usual_s, machine.steps_s, len(machine.steps_s)


def test_streams_go_on_beside_a_long_prompt() -> None:
    machine = Machine()
    usual_s, gaps_s, num_steps = gaps_beside_a_long_prompt(timed_core(machine), machine)
    assert usual_s == pytest.approx(DECODE_S)
    assert max(gaps_s) <= 3 * usual_s
    assert statistics.median(gaps_s) == pytest.approx(2.4 * usual_s, rel=0.2), "the time is used"
    assert num_steps < 600


def test_a_burst_does_not_wait_for_the_few_that_were_first() -> None:
    """Many more requests wait than generate; the more of them generate, the longer takes a step."""
    machine = Machine(row_s=0.002)
    core = timed_core(machine, max_num_seqs=64, num_kv_blocks=1000)
    streams(core)
    for _ in range(20):
        core.step()
    began_s, waiting = machine.now_s, {f"b{i}" for i in range(60)}
    for i, request_id in enumerate(sorted(waiting)):
        core.add(make_request(request_id, [(i + j) % 250 for j in range(70)], max_tokens=500, ignore_eos=True))
    while waiting:
        waiting -= {output.request_id for output in core.step().outputs if output.token_ids}
    alone_s = 60 * 70 * TOKEN_S
    assert machine.now_s - began_s < 3 * alone_s


def test_without_a_target_they_stall() -> None:
    machine = Machine()
    usual_s, gaps_s, _ = gaps_beside_a_long_prompt(timed_core(machine, step_target_ms=0), machine)
    assert max(gaps_s) > 20 * usual_s


def test_a_target_in_milliseconds() -> None:
    machine = Machine()
    _, gaps_s, _ = gaps_beside_a_long_prompt(timed_core(machine, step_target_ms=150), machine)
    assert statistics.median(gaps_s) == pytest.approx(0.15, rel=0.2)
    assert max(gaps_s) < 0.25


def test_a_machine_that_is_busy_at_times() -> None:
    """Every ninth step takes five times as long: that is not taken for the cost of prompts."""
    count = iter(range(10**6))
    machine = Machine(slowdown=lambda: 5.0 if next(count) % 9 == 8 else 1.0)
    usual_s, gaps_s, num_steps = gaps_beside_a_long_prompt(timed_core(machine), machine)
    assert statistics.median(gaps_s) <= 3 * usual_s
    assert num_steps < 900, "the prompt goes on in chunks of a fair size"


def test_a_target_that_generating_takes_up_alone_leaves_the_smallest_chunk() -> None:
    machine = Machine()
    _, gaps_s, num_steps = gaps_beside_a_long_prompt(timed_core(machine, step_target_ms=1), machine, 1000)
    assert num_steps == pytest.approx(1000 / MIN_CHUNK_TOKENS, rel=0.1)
    assert max(gaps_s) < 3 * DECODE_S


def test_a_prompt_without_neighbours_has_the_whole_budget() -> None:
    machine = Machine()
    core = timed_core(machine)
    core.add(make_request("long", [i % 250 for i in range(8000)], max_tokens=1))
    while core.has_work:
        core.step()
    assert len(machine.steps_s) == -(-8000 // 512)


def test_tokens_are_those_without_pacing() -> None:
    machine = Machine()
    core = timed_core(machine, num_kv_blocks=60, block_size=16)
    requests = [make_request(f"s{i}", (i + 1,) * 10, max_tokens=200, temperature=0.8, seed=i) for i in range(3)]
    requests += [make_request(f"l{i}", [(7 * j + i) % 250 for j in range(600)], max_tokens=9) for i in range(3)]
    outcomes = run_to_end(core, requests)
    for request in requests:
        expect_oracle(outcomes[request.request_id], request, MAX_MODEL_LEN)


def test_steps_in_flight_are_paced_too() -> None:
    with devices_closed():
        config = EngineConfig(
            model="mock", mock_steps_in_flight=2, step_target_ms=0.5, max_model_len=2000, max_num_batched_tokens=256
        )
        core = EngineCore(config, PacedDevice(config))
        requests = [make_request(f"s{i}", (i + 1,) * 10, max_tokens=100, ignore_eos=True) for i in range(3)]
        requests.append(make_request("long", [i % 250 for i in range(1500)], max_tokens=5))
        outcomes = run_to_end(core, requests)
        for request in requests:
            expect_oracle(outcomes[request.request_id], request, 2000)


@pytest.mark.parametrize(
    ("arguments", "is_paced"),
    [
        ({"model": "a model"}, True),
        ({"model": "a model", "step_target_ms": 0}, False),
        ({"model": "a model", "device": "cuda"}, False),
        ({"model": "a model", "device": "cuda", "step_target_ms": 40}, True),
        ({"model": "mock"}, False),
        ({"model": "mock", "step_target_ms": 40}, True),
    ],
)
def test_what_is_paced(arguments: dict[str, Any], is_paced: bool) -> None:
    core = EngineCore(EngineConfig(**arguments), MockRunner(EngineConfig(model="mock", max_num_seqs=2)))
    assert (core._pacer is not None) == is_paced


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
def test_a_target_that_is_no_time_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"'step_target_ms' is .*, expected a number of at least 0"):
        EngineConfig(model="mock", step_target_ms=value)


# --- the measurements -------------------------------------------------------------------------------------------------


def test_a_step_without_prompts_is_measured_first_and_then_at_times() -> None:
    pacer = StepPacer(None)
    assert pacer.budget(512, 4).is_spent, "nothing is known: this step computes no prompt"
    pacer.begin(StepWork(4, ()))
    assert not pacer.budget(512, 4).is_spent, "its measurement is under way"
    pacer.end(0.03)
    for _ in range(step_pacing.STEPS_BETWEEN_MEASUREMENTS):
        tokens = pacer.budget(512, 4).affordable_tokens(0, 5000)
        assert tokens >= MIN_CHUNK_TOKENS
        pacer.begin(StepWork(4, ((0, tokens),)))
        pacer.end(0.03 + tokens * 0.001)
    assert pacer.budget(512, 4).is_spent
    pacer.begin(StepWork(4, ()))
    pacer.end(0.03)
    assert pacer.budget(512, 4).affordable_tokens(0, 5000) == 32, "45 ms, in whole tiles"


def test_steps_of_other_sizes_are_measured_again() -> None:
    pacer = StepPacer(None)
    pacer.begin(StepWork(4, ()))
    pacer.end(0.02)
    pacer.begin(StepWork(4, ((0, 32),)))
    assert not pacer.budget(512, 6).is_spent, "the step with prefill is under way"
    pacer.end(0.02 + 32 * 0.001)
    assert not pacer.budget(512, 5).is_spent
    assert pacer.budget(512, 6).is_spent
    pacer.begin(StepWork(6, ()))
    assert not pacer.budget(512, 6).is_spent, "its measurement is under way"
    pacer.end(0.05)
    pacer.begin(StepWork(6, ((0, 32),)))
    pacer.end(0.05 + 32 * 0.001)
    assert pacer.budget(512, 4).is_spent and not pacer.budget(512, 7).is_spent
    assert pacer.budget(512, 6).affordable_tokens(0, 512) == 64, "1.4 times 50 ms, in whole tiles"
    assert pacer.budget(512, 6, num_prompts=18).affordable_tokens(0, 512) == 144, "3 times 50 ms"


@pytest.mark.parametrize("num_in_flight", [0, 1, 2])
def test_prompts_advance_while_the_number_of_rows_alternates(num_in_flight: int) -> None:
    pacer, spent = StepPacer(None), []
    for i in range(40):
        num_decodes = 2 + 2 * (i % 2)
        budget = pacer.budget(512, num_decodes)
        spent.append(budget.is_spent)
        pacer.begin(StepWork(num_decodes, () if budget.is_spent else ((0, 32),)))
        if i >= num_in_flight:
            pacer.end(0.02)
    assert not any(one and following for one, following in pairwise(spent))


def test_what_was_measured_of_short_contexts_serves_longer_ones() -> None:
    pacer = StepPacer(0.105)
    pacer.begin(StepWork(4, ()))
    pacer.end(0.02)
    for context, token_s in ((100, 0.001), (5000, 0.003)):
        for _ in range(12):
            pacer.begin(StepWork(4, ((context, 50),)))
            pacer.end(0.02 + 50 * token_s)
    assert pacer.token_s(0) == pytest.approx(0.001, rel=0.05)
    assert pacer.token_s(7000) == pytest.approx(0.003, rel=0.05)
    assert pacer.token_s(2000) == pacer.token_s(0)
    assert pacer.token_s(30_000) == pacer.token_s(7000)
    assert [pacer.budget(512, 4).affordable_tokens(context, 5000) for context in (0, 7000)] == [80, 28]


# --- short and long prompts -------------------------------------------------------------------------------------------


def fair(budget: int = 16, threshold: int = 30, **sizes: int) -> Harness:
    harness = Harness(budget=budget, **sizes)
    harness.scheduler = Scheduler(harness.rows, harness.kv_cache, budget, threshold)
    return harness


def test_short_prompts_do_not_wait_behind_a_long_one() -> None:
    harness = fair()
    harness.add("long", 200)
    assert harness.step()[0] == {"long": 16}
    harness.add("short", 20)
    assert harness.step() == ({"long": 8, "short": 8}, set())
    assert harness.step() == ({"long": 8, "short": 8}, set())
    assert harness.step() == ({"long": 12, "short": 4}, {"short"}), "and it has what the short one does not need"
    assert harness.step()[0] == {"long": 15, "short": 1}, "alone again, it has all that is left"


def test_a_second_long_prompt_waits_and_short_ones_overtake_it() -> None:
    harness = fair()
    harness.add("long", 100)
    harness.step()
    harness.add("second", 100)
    harness.add("short", 6)
    assert harness.step() == ({"long": 10, "short": 6}, {"short"})
    assert harness.step()[0] == {"short": 1, "long": 15}
    while "second" not in (chunks := harness.step()[0]):
        assert len(chunks) <= 2
    assert harness.table.num_tokens[harness.sequences["long"].row] >= 100


def test_a_long_prompt_does_not_wait_for_one_of_lower_priority() -> None:
    harness = fair()
    harness.add("low", 100, priority=2)
    harness.step()
    harness.add("high", 62, priority=1)
    harness.add("equal", 40, priority=2)
    assert harness.step()[0] == {"low": 8, "high": 8}
    assert [harness.step()[0] for _ in range(2)] == [{"high": 16}] * 2
    assert harness.step()[0] == {"high": 8, "low": 8}, "the rest of it is short, and the other one waits"


def test_a_prompt_whose_prefix_is_cached_is_as_long_as_the_rest() -> None:
    """A second turn of a chat does not wait for another client's long prompt."""
    core = make_core(max_num_batched_tokens=64, num_kv_blocks=400, block_size=16, max_model_len=4000)
    turn = [i * 7 % 250 for i in range(500)]
    run_to_end(core, [make_request("first", turn)])
    long = make_request("long", [i * 11 % 250 for i in range(2000)], max_tokens=1)
    core.add(long)
    core.step()
    second = make_request("second", [*turn, 1, 2, 3], max_tokens=1)
    core.add(second)
    core.add(make_request("other", [*range(3, 200)], max_tokens=1))
    [output] = core.step().outputs
    assert (output.request_id, output.num_cached_tokens) == ("second", 496)
    outcomes = run_to_end(core)
    expect_oracle(outcomes["long"], long)


def test_half_of_a_step_is_not_left_to_short_prompts_that_cannot_run() -> None:
    harness = fair(budget=16, blocks=30, block_size=4, rows=3)
    harness.add("generating", 1)
    harness.add("long", 99)
    harness.step()
    harness.add("short", 20)
    for _ in range(4):
        assert harness.step()[0] == {"generating": 1, "long": 15}
    assert harness.scheduler.wait_reason == "kv_blocks"


def test_long_prompts_do_not_starve_under_short_ones() -> None:
    harness = fair(rows=12)
    harness.add("long", 128)
    progress = 0
    for i in range(16):
        harness.add(f"s{i}", 8)
        chunks, sampled = harness.step()
        progress += chunks.get("long", 0)
        for name in sampled & {f"s{j}" for j in range(16)}:
            harness.scheduler.remove(harness.sequences.pop(name))
    assert progress >= 16 * 7, "half of each step is its own"


def test_prompts_that_come_later_leave_a_long_one_its_blocks() -> None:
    harness = fair(budget=8, blocks=10, block_size=4)
    harness.add("long", 36)
    harness.step()
    harness.add("short", 8)
    for _ in range(4):
        assert set(harness.step()[0]) == {"long"}
    assert harness.scheduler.num_preemptions == 0


def test_generating_rows_do_not_keep_a_prompt_that_came_first_from_its_end() -> None:
    harness = fair(budget=2, threshold=1000)
    for name in ("a", "b"):
        harness.add(name, 1)
    assert harness.step()[0] == {"a": 1, "b": 1}
    harness.add("urgent", 9, priority=-1)
    harness.scheduler.remove(harness.sequences["b"])
    assert harness.step()[0] == {"a": 1, "urgent": 1}
    harness.add("c", 1, priority=-2)
    steps = [harness.step()[0] for _ in range(12)]
    assert sum(chunks.get("urgent", 0) for chunks in steps) >= 8
