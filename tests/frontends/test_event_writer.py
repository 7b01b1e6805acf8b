"""The order of collected events, and what they hold."""

from __future__ import annotations

import json
from typing import Any

from llmbackend.core.activity.hub import ActivityHub, Source
from llmbackend.core.activity.messages import (
    EVENT_KINDS,
    Activity,
    BlockCounts,
    EngineActivity,
    RequestActivity,
    RequestEnd,
    RequestEnded,
    RequestsReceived,
    StepActivity,
    StepParts,
)
from llmbackend.frontends.operations.engine_events import EventWriter

A, B = Source("m", "1", "m_0"), Source("m", "1", "m_1")


def received(*numbers: int, key: str = "") -> RequestsReceived:
    return RequestsReceived(tuple(RequestActivity(request=number, received=0.0, key=key) for number in numbers))


def ended(number: int) -> RequestEnded:
    return RequestEnded(RequestEnd(request=number, time=0.0, finish_reason="stop"))


def step(*numbers: int) -> StepActivity:
    return StepActivity(
        step=1,
        time=0.0,
        duration_ms=1.0,
        parts_ms=StepParts(0.1, 0.8, 0.1),
        rows=tuple((number, "decode", 1, 0, 1) for number in numbers),
        preempted=numbers,
        waiting=tuple((number, "kv_blocks") for number in numbers),
        num_running=len(numbers),
        num_waiting=0,
        blocks=BlockCounts(1, 2, 3),
    )


def written(*reports: tuple[Source, Activity], key_name: str | None = None) -> list[tuple[str, Any]]:
    """Name and data of the events of one interval."""
    hub = ActivityHub()
    viewer = hub.open(EVENT_KINDS, None, lambda: None)
    for source, activity in reports:
        hub.report(source, activity)
    text = EventWriter(EVENT_KINDS, frozenset(), key_name).events("0-1", viewer.read()[0]).decode()
    lines = [event.split("\n") for event in text.split("\n\n") if event]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, _, data in lines]


def numbers(data: Any) -> tuple[str, list[int], list[int]]:
    return data["instance"], [one["request"] for one in data["received"]], [one["request"] for one in data["ended"]]


def test_requests_come_before_their_steps_and_end_behind_them() -> None:
    events = written((A, received(1)), (A, step(1)), (A, ended(1)), (A, received(2)), (A, step(2)), (A, received(3)))
    assert [name for name, _ in events] == ["requests", "steps", "requests"]
    assert numbers(events[0][1]) == ("m_0", [1, 2, 3], [])
    assert [one["rows"][0][0] for one in events[1][1]["steps"]] == [1, 2]
    assert numbers(events[2][1]) == ("m_0", [], [1])


def test_a_request_that_another_instance_takes_belongs_to_that_one_at_the_end() -> None:
    events = written((B, step(9)), (A, received(1, 2)), (B, received(2)), (A, received(3)))
    told = [numbers(data)[:2] for name, data in events if name == "requests"]
    assert told == [("m_0", [1, 2]), ("m_1", [2]), ("m_0", [3])]


def test_a_change_of_state_keeps_its_place() -> None:
    lost = EngineActivity(time=0.0, state="recovering", reason="killed")
    events = written((A, received(1)), (A, step(1)), (A, lost), (A, received(1)), (A, step(1)))
    assert [name for name, _ in events] == ["requests", "steps", "engine", "requests", "steps"]
    assert events[2][1]["reason"] == "killed"


def test_a_key_sees_its_own() -> None:
    lost = EngineActivity(time=0.0, state="recovering", reason="killed")
    reports = ((A, received(1, key="alice")), (A, received(2, key="bob")), (A, step(1, 2)), (A, ended(2)), (A, lost))
    (_, got), (_, steps), (_, engine) = written(*reports, key_name="alice")
    assert numbers(got) == ("m_0", [1], [])
    (only,) = steps["steps"]
    assert (only["rows"], only["preempted"], only["waiting"]) == ([[1, "decode", 1, 0, 1]], [1], [[1, "kv_blocks"]])
    assert engine["reason"] == ""
