"""What the Operations page makes of the feed's events."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("nicegui")

from llmbackend.pages.operations.sections import _model_row, duration
from llmbackend.pages.operations.state import LoadStage, ModelVersion, ServerState

AT = {"model": "demo", "version": "1", "instance": "demo_0"}


def request(number: int, **fields: Any) -> dict[str, Any]:
    before = {"request": number, "id": "", "key": "", "received": 10.0, "prompt_tokens": 5, "max_tokens": 20}
    return before | {"state": "waiting", "reason": "max_num_seqs", "output_tokens": 0} | fields


def snapshot(*requests: dict[str, Any]) -> dict[str, Any]:
    instance = AT | {"state": "ready", "pid": 7, "num_restarts": 0, "limits": {}, "requests": list(requests)}
    return {"time": 1.0, "scope": "all", "instances": [instance]}


def step(rows: list[list[Any]], waiting: list[list[Any]] | None = None) -> dict[str, Any]:
    return {"step": 1, "rows": rows, "waiting": waiting or [], "preempted": []}


@pytest.fixture
def server() -> ServerState:
    made = ServerState()
    made.take_index([{"name": "big"}, {"name": "demo", "version": "1", "state": "READY"}])
    made.apply("snapshot", snapshot(request(1)))
    return made


def test_a_server_that_cannot_be_reached_has_no_ready_model(server: ServerState) -> None:
    server.lose()
    assert [row.state for row in server.models] == ["UNKNOWN", "UNKNOWN"]
    assert not server.instances and not server.requests
    shown = _model_row(server.models[1], server, may_load=True)
    assert (shown["state"]["text"], shown["state"]["tone"]) == ("not known", "quiet")
    assert all(button["disabled"] for button in shown["actions"])


def test_a_request_from_its_arrival_to_its_end(server: ServerState) -> None:
    server.apply("requests", AT | {"received": [request(2, key="alice")], "ended": []})
    assert [(one.number, one.state, one.reason) for one in server.requests.values()] == [
        (1, "waiting", "max_num_seqs"),
        (2, "waiting", "max_num_seqs"),
    ]
    rows = [[1, "prefill", 5, 0, 1], [2, "prefill", 3, 0, 0]]
    server.apply("steps", AT | {"steps": [step(rows), step([[1, "decode", 3, 2, 3]], [[2, "kv_blocks"]])]})
    first, second = server.requests.values()
    assert (first.state, first.reason, first.output_tokens) == ("running", "", 4)
    assert (second.state, second.reason, second.output_tokens, second.key) == ("waiting", "kv_blocks", 0, "alice")
    server.apply("requests", AT | {"ended": [{"request": 1}, {"request": 99}]})
    assert list(server.requests) == [2]


def test_a_snapshot_replaces_what_was_known(server: ServerState) -> None:
    server.apply("snapshot", snapshot(request(3)) | {"scope": "own"})
    assert list(server.requests) == [3] and server.scope == "own"
    server.apply("snapshot", {"time": 2.0, "scope": "all", "instances": []})
    assert not server.requests and not server.instances


def test_instances_and_models_follow_their_events(server: ServerState) -> None:
    demo = ModelVersion("demo", "1", "READY")
    server.apply("engine", AT | {"state": "recovering", "reason": "killed", "pid": None, "num_restarts": 1})
    (instance,) = server.instances_of(demo)
    assert (instance.state, instance.reason, instance.num_restarts) == ("recovering", "killed", 1)
    server.apply("engine", AT | {"state": "stopped"})
    assert server.instances_of(demo) == []
    loading = {"model": "big", "version": "1", "state": "LOADING", "reason": ""}
    server.apply("model", loading)
    server.apply("load", {"model": "big", "version": "1", "stage": "loading weights", "done": 1, "total": 4})
    assert server.models == [ModelVersion("big", "1", "LOADING"), demo]
    assert server.loads == {"big": LoadStage("loading weights", 1, 4)} and server.loads["big"].share == 0.25
    server.apply("model", loading | {"state": "UNAVAILABLE", "reason": "no memory"})
    assert server.models[0] == ModelVersion("big", "1", "UNAVAILABLE", "no memory") and not server.loads
    server.apply("model", loading | {"version": "2"})
    assert [(one.name, one.version) for one in server.models] == [("big", "1"), ("big", "2"), ("demo", "1")]


def test_an_unknown_event_changes_nothing(server: ServerState) -> None:
    server.apply("of_a_later_release", {"model": "demo"})
    assert list(server.requests) == [1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (59.9, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
