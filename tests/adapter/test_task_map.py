"""The infer-task map without engines: order, shares, bounds, and what happens to a dead engine's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.adapter.schemas.schema import TaskTimes
from llmbackend.adapter.tasks.placement import Placement, PlacementState, PrefixIndex
from llmbackend.adapter.tasks.task_map import EngineAssignment, TaskMap
from llmbackend.core.backend_api import cancelled
from llmbackend.engine.errors import DeathKind
from llmbackend.engine.messages import InferRequest, SamplingParams, StepOutput
from llmbackend.waiting.queue_policy import QueuePolicies


@dataclass(eq=False)
class Task:
    """What the map sees of an InferTask."""

    infer_request: InferRequest
    is_delayed: bool = False
    is_suspect: bool = False
    isolated_deaths: list[str] = field(default_factory=list)
    lost_ns: int = 0
    placement: PlacementState | None = None
    times: TaskTimes = field(default_factory=lambda: TaskTimes(1))
    request_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = self.infer_request.request_id

    @property
    def lane(self) -> tuple[int, bool]:
        return self.infer_request.priority, self.is_delayed


def make_task(name: str, priority: int = 0) -> Any:
    sampling = SamplingParams()
    return Task(InferRequest(request_id=name, prompt_token_ids=(1,), sampling=sampling, priority=priority))


def make_map(pbtxt: str = "", max_queue_size: int = 100) -> TaskMap:
    config = text_format.Parse(pbtxt, ModelConfig())
    return TaskMap(QueuePolicies.of(config.dynamic_batching), max_queue_size, Placement(PrefixIndex()))


def assignment(bit: int = 1, room: int = 10) -> EngineAssignment:
    return EngineAssignment(lambda: None, lambda: room, bit)


def queue(tasks: TaskMap, *names: str, priority: int = 0) -> None:
    for name in names:
        task = make_task(name, priority)
        assert tasks.admit(task) == ""
        tasks.enqueue(task)


def take(
    tasks: TaskMap,
    engine: EngineAssignment,
    room: int = 10,
    others: Sequence[EngineAssignment] = (),
    now_s: float = 1.0,
) -> list[str]:
    return [task.request_id for task in tasks.take(engine, room, [engine, *others], int(now_s * 1e9))]


def tokens(tasks: TaskMap, engine: EngineAssignment, *names: str, count: int = 2) -> None:
    for _ in range(count):
        tasks.record_outputs(engine, [StepOutput(name, (1,)) for name in names])


def die(
    tasks: TaskMap, engine: EngineAssignment, *names: str, kind: DeathKind = "signal"
) -> tuple[list[str], str | None]:
    lost = tasks.engine_died(engine, names, kind, 7)
    return [task.request_id for task in lost.requeued], lost.blamed.request_id if lost.blamed else None


def test_engines_share_the_queue_in_its_order() -> None:
    tasks, one, two = make_map(), assignment(), assignment(2)
    queue(tasks, *"abcde")
    assert take(tasks, one, others=[two]) == ["a", "c", "e"]
    assert take(tasks, two, room=1, others=[one]) == ["b"]
    assert tasks.num_queued == 1


def test_levels_go_in_order_and_what_was_delayed_goes_last_in_its_level() -> None:
    batching = "priority_levels: 2 default_queue_policy { timeout_action: DELAY }"
    tasks = make_map(f"dynamic_batching {{ {batching} }}")
    queue(tasks, "low", priority=2)
    queue(tasks, "late", "next", priority=1)
    assert not tasks.expired_in_queue("late")
    assert take(tasks, assignment()) == ["next", "late", "low"]


def test_an_expired_queue_time_ends_only_queued_requests() -> None:
    tasks, engine = make_map(), assignment()
    queue(tasks, "a", "b")
    assert take(tasks, engine, room=1) == ["a"]
    assert not tasks.expired_in_queue("a")
    assert tasks.expired_in_queue("b")
    assert not tasks.expired_in_queue("unknown")


POLICY = "dynamic_batching { default_queue_policy { timeout_action: %s } }"


@pytest.mark.parametrize("action", ["REJECT", "DELAY"])
def test_a_request_that_an_engine_had_is_not_too_late(action: str) -> None:
    tasks, engine, other = make_map(POLICY % action), assignment(), assignment(2)
    queue(tasks, *"ab")
    for task in tasks.take(engine, 2, [engine], 1):
        task.times.taken_ns = 1
    tokens(tasks, engine, *"ab")
    die(tasks, engine, *"ab")
    assert not tasks.expired_in_queue("a")
    assert take(tasks, other) == ["a", "b"]
    tasks.hand_over(other, engine)
    assert not tasks.expired_in_queue("a")
    assert take(tasks, engine) == ["a", "b"]


@pytest.mark.parametrize(("pbtxt", "size"), [("", 2), ("default_queue_policy { max_queue_size: 2 }", 100)])
def test_a_full_queue_says_so(pbtxt: str, size: int) -> None:
    tasks = make_map(f"dynamic_batching {{ {pbtxt} }}", size)
    queue(tasks, "a", "b")
    assert "its queue holds 2 requests" in tasks.admit(make_task("c"))
    assert "c" not in tasks
    take(tasks, assignment(), room=1)
    assert tasks.admit(make_task("c")) == ""


def test_what_a_dead_engine_had_goes_first_and_in_order() -> None:
    tasks, engine = make_map(), assignment()
    queue(tasks, *"abcd")
    assert take(tasks, engine, room=3) == ["a", "b", "c"]
    tokens(tasks, engine, "a", "b", "c")
    tasks.pop("b")
    assert die(tasks, engine, "a", "b", "c") == (["a", "c"], None)
    assert take(tasks, engine) == ["a", "c", "d"]
    assert tasks.leaked_resources([engine]) == ""


def test_suspects_run_one_at_a_time() -> None:
    tasks, engine = make_map(), assignment()
    queue(tasks, *"abcd")
    take(tasks, engine, room=3)
    tokens(tasks, engine, "a")
    die(tasks, engine, "a", "b", "c")
    assert take(tasks, engine) == ["a"]
    tokens(tasks, engine, "a", count=1)
    assert take(tasks, engine) == []
    tokens(tasks, engine, "a", count=1)
    assert take(tasks, engine) == ["b"]
    assert take(tasks, engine) == []
    tokens(tasks, engine, "b")
    assert take(tasks, engine) == ["c"]
    tasks.pop("c")
    assert take(tasks, engine) == ["d"]


def test_the_second_death_in_isolation_blames_a_request() -> None:
    tasks, engine = make_map(), assignment()
    queue(tasks, "harmless", "poison")
    take(tasks, engine)
    assert die(tasks, engine, "harmless", "poison") == (["harmless", "poison"], None)
    assert take(tasks, engine) == ["harmless"]
    tokens(tasks, engine, "harmless")
    assert take(tasks, engine) == ["poison"]
    assert die(tasks, engine, "harmless", "poison") == (["poison", "harmless"], None)
    assert take(tasks, engine) == ["poison"]
    assert die(tasks, engine, "poison") == ([], "poison")
    assert "poison" not in tasks


def test_a_suspect_with_a_death_in_isolation_runs_before_other_suspects() -> None:
    tasks, engine = make_map(), assignment()
    queue(tasks, *"abc")
    take(tasks, engine)
    die(tasks, engine, *"abc")
    assert take(tasks, engine) == ["a"]
    tokens(tasks, engine, "a")
    assert take(tasks, engine) == ["b"]
    assert die(tasks, engine, "a", "b") == (["b", "a"], None)
    assert take(tasks, engine) == ["b"]
    tokens(tasks, engine, "b")
    assert take(tasks, engine) == ["a"]


@pytest.mark.parametrize("kind", ["killed", "disconnect"])
def test_an_engine_lost_from_outside_counts_less_against_its_request(kind: DeathKind) -> None:
    tasks, engine = make_map(), assignment()
    queue(tasks, "a")
    for _ in range(4):
        take(tasks, engine)
        assert die(tasks, engine, "a", kind=kind) == (["a"], None)
    take(tasks, engine)
    assert die(tasks, engine, "a", kind=kind) == ([], "a")


def test_tokens_clear_a_request_of_earlier_deaths() -> None:
    tasks, engine = make_map(), assignment()
    queue(tasks, "a")
    for _ in range(5):
        assert take(tasks, engine) == ["a"]
        assert die(tasks, engine, "a") == (["a"], None)
        assert take(tasks, engine) == ["a"]
        tokens(tasks, engine, "a")
        assert die(tasks, engine, "a") == (["a"], None)


def test_a_stopped_request_is_ended_by_its_engine() -> None:
    tasks, one, two = make_map(), assignment(), assignment()
    queue(tasks, "queued", "held", "moved")
    error = cancelled("x")
    assert tasks.request_stop("queued", error, one) is one
    assert tasks.request_stop("moved", error, one) is one
    tasks.pop("queued")
    assert take(tasks, two) == ["held", "moved"]
    assert tasks.request_stop("held", error, one) is two
    controls = tasks.take_controls(one)
    assert not controls.ended and controls.elsewhere == [two]
    controls = tasks.take_controls(two)
    assert [task.request_id for task, _ in controls.ended] == controls.stop == ["held", "moved"]
    assert tasks.request_stop("held", error, one) is None
    assert tasks.leaked_resources([one, two]) == ""


def test_the_self_check_finds_leaked_resources() -> None:
    tasks, engine = make_map(), assignment()
    queue(tasks, "a")
    take(tasks, engine)
    tasks.pop("a")
    engine.isolation.add(make_task("leaked"))
    assert tasks.leaked_resources([engine]) == "without a task, 0 are queued, 0 owned by an engine, 1 in isolation"
