"""The infer-task map without engines: order, shares, bounds, and what becomes of a dead engine's requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.adapter.task_map import Holder, TaskMap
from llmbackend.core.backend_api import cancelled
from llmbackend.engine.infer_request import InferRequest, SamplingParams, StepOutput
from llmbackend.engine.transport import DeathKind
from llmbackend.waiting.queue_policy import QueuePolicies


@dataclass(eq=False)
class Task:
    """What the map sees of an InferTask."""

    infer_request: InferRequest
    is_delayed: bool = False
    is_suspect: bool = False
    trial_deaths: list[str] = field(default_factory=list)
    lost_ns: int = 0
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
    return TaskMap(QueuePolicies.of(config.dynamic_batching), max_queue_size)


def holder() -> Holder:
    return Holder(lambda: None)


def queue(tasks: TaskMap, *names: str, priority: int = 0) -> None:
    for name in names:
        task = make_task(name, priority)
        assert tasks.admit(task) == ""
        tasks.enqueue(task)


def take(tasks: TaskMap, engine: Holder, room: int = 10, num_engines: int = 1) -> list[str]:
    return [task.request_id for task in tasks.take(engine, room, num_engines)]


def tokens(tasks: TaskMap, engine: Holder, *names: str, count: int = 2) -> None:
    for _ in range(count):
        tasks.outputs_came(engine, [StepOutput(name, (1,)) for name in names])


def die(tasks: TaskMap, engine: Holder, *names: str, kind: DeathKind = "signal") -> tuple[list[str], str | None]:
    loss = tasks.engine_died(engine, names, kind, 7)
    return [task.request_id for task in loss.go_on], loss.convicted and loss.convicted.request_id


def test_engines_share_the_queue_in_its_order() -> None:
    tasks, one, two = make_map(), holder(), holder()
    queue(tasks, *"abcde")
    assert take(tasks, one, num_engines=2) == ["a", "b", "c"]
    assert take(tasks, two, room=1) == ["d"]
    assert tasks.num_queued == 1


def test_levels_go_in_order_and_what_was_delayed_goes_last_in_its_level() -> None:
    batching = "priority_levels: 2 default_queue_policy { timeout_action: DELAY }"
    tasks = make_map(f"dynamic_batching {{ {batching} }}")
    queue(tasks, "low", priority=2)
    queue(tasks, "late", "next", priority=1)
    assert not tasks.expired_in_queue("late")
    assert take(tasks, holder()) == ["next", "late", "low"]


def test_a_time_that_is_over_ends_only_what_still_waits() -> None:
    tasks, engine = make_map(), holder()
    queue(tasks, "a", "b")
    assert take(tasks, engine, room=1) == ["a"]
    assert not tasks.expired_in_queue("a")
    assert tasks.expired_in_queue("b")
    assert not tasks.expired_in_queue("nobody")


@pytest.mark.parametrize(("pbtxt", "size"), [("", 2), ("default_queue_policy { max_queue_size: 2 }", 100)])
def test_a_full_queue_says_so(pbtxt: str, size: int) -> None:
    tasks = make_map(f"dynamic_batching {{ {pbtxt} }}", size)
    queue(tasks, "a", "b")
    assert "its queue holds 2 requests" in tasks.admit(make_task("c"))
    assert "c" not in tasks
    take(tasks, holder(), room=1)
    assert tasks.admit(make_task("c")) == ""


def test_what_a_dead_engine_had_goes_first_and_in_order() -> None:
    tasks, engine = make_map(), holder()
    queue(tasks, *"abcd")
    assert take(tasks, engine, room=3) == ["a", "b", "c"]
    tokens(tasks, engine, "a", "b", "c")
    tasks.pop("b")
    assert die(tasks, engine, "a", "b", "c") == (["a", "c"], None)
    assert take(tasks, engine) == ["a", "c", "d"]
    assert tasks.leftovers([engine]) == ""


def test_suspects_are_tried_one_at_a_time() -> None:
    tasks, engine = make_map(), holder()
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


def test_the_second_death_alone_convicts() -> None:
    tasks, engine = make_map(), holder()
    queue(tasks, "innocent", "poison")
    take(tasks, engine)
    assert die(tasks, engine, "innocent", "poison") == (["innocent", "poison"], None)
    assert take(tasks, engine) == ["innocent"]
    tokens(tasks, engine, "innocent")
    assert take(tasks, engine) == ["poison"]
    assert die(tasks, engine, "innocent", "poison") == (["poison", "innocent"], None)
    assert take(tasks, engine) == ["poison"]
    assert die(tasks, engine, "poison") == ([], "poison")
    assert "poison" not in tasks


def test_who_has_a_strike_is_tried_before_other_suspects() -> None:
    tasks, engine = make_map(), holder()
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


def test_an_engine_that_was_killed_from_outside_speaks_less_against_its_request() -> None:
    tasks, engine = make_map(), holder()
    queue(tasks, "a")
    for _ in range(4):
        take(tasks, engine)
        assert die(tasks, engine, "a", kind="killed") == (["a"], None)
    take(tasks, engine)
    assert die(tasks, engine, "a", kind="killed") == ([], "a")


def test_tokens_acquit_of_earlier_deaths() -> None:
    tasks, engine = make_map(), holder()
    queue(tasks, "a")
    for _ in range(5):
        assert take(tasks, engine) == ["a"]
        assert die(tasks, engine, "a") == (["a"], None)
        assert take(tasks, engine) == ["a"]
        tokens(tasks, engine, "a")
        assert die(tasks, engine, "a") == (["a"], None)


def test_who_ends_a_request_that_is_given_up() -> None:
    tasks, one, two = make_map(), holder(), holder()
    queue(tasks, "queued", "held", "moved")
    error = cancelled("x")
    assert tasks.give_up("queued", error, one) is one
    assert tasks.give_up("moved", error, one) is one
    tasks.pop("queued")
    assert take(tasks, two) == ["held", "moved"]
    assert tasks.give_up("held", error, one) is two
    controls = tasks.controls(one)
    assert not controls.ended and controls.elsewhere == [two]
    controls = tasks.controls(two)
    assert [task.request_id for task, _ in controls.ended] == controls.stop == ["held", "moved"]
    assert tasks.give_up("held", error, one) is None
    assert tasks.leftovers([one, two]) == ""


def test_the_self_check_sees_what_is_left_behind() -> None:
    tasks, engine = make_map(), holder()
    queue(tasks, "a")
    take(tasks, engine)
    tasks.pop("a")
    engine.probation.take(make_task("ghost"))
    assert tasks.leftovers([engine]) == "without a task, 0 are queued, 0 owned by an engine, 1 on probation"
