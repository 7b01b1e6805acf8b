"""Who watches the server: what is told to instances and viewers, what is bounded, and what the host says by itself of
backends that report nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.activity import hub as hub_module
from llmbackend.core.activity.hub import ActivityHub, Entry, Reporter, Source, Viewer
from llmbackend.core.activity.messages import (
    MAX_ID_CHARACTERS,
    EventKind,
    InstanceDescription,
    LoadActivity,
    ModelActivity,
    RequestActivity,
    RequestsReceived,
    to_json,
)
from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.messages import Tenant
from tests.helpers.core_host import KEEPING_BACKEND, STAGE, WAIT_S, Repository, send, serving

LOADS: frozenset[EventKind] = frozenset({"load"})
SOURCE = Source("m", "1", "m_0")


def load(done: int, stage: str = "reading") -> LoadActivity:
    return LoadActivity(time=0.0, stage=stage, done=done, total=9)


def opened(hub: ActivityHub, kinds: frozenset[EventKind] = LOADS, key_name: str | None = None) -> Viewer:
    return hub.open(kinds, key_name, lambda: None)


def done(entries: list[Entry]) -> list[int]:
    return [json.loads(entry.data)["done"] for entry in entries]


class Instance:
    def __init__(self, name: str = "m_0") -> None:
        self.source = Source("m", "1", name)
        self.told: list[set[str]] = []

    def watch(self, kinds: frozenset[EventKind]) -> None:
        self.told.append(set(kinds))

    def describe(self) -> InstanceDescription:
        return InstanceDescription(state="ready")


def test_viewers_read_what_comes_after_them_once_and_in_order() -> None:
    hub = ActivityHub()
    reporter = Reporter(hub, SOURCE)
    first = opened(hub)
    reporter.report(load(1))
    second = opened(hub)
    reporter.report(load(2))
    entries, dropped = first.read()
    assert (done(entries), dropped) == ([1, 2], 0)
    assert done(second.read()[0]) == [2]
    assert first.read() == ([], 0)
    reporter.report(load(3))
    assert done(first.read()[0]) == done(second.read()[0]) == [3]
    assert first.position == second.position == f"{hub.epoch}-3"


def test_what_nobody_watches_is_not_kept() -> None:
    hub = ActivityHub()
    hub.report(SOURCE, load(1))
    viewer = opened(hub)
    hub.report(SOURCE, ModelActivity(time=0.0, state="READY"))
    assert viewer.read() == ([], 0)
    assert hub.last_sequence == 0


def test_ids_that_are_no_text() -> None:
    hub = ActivityHub()
    viewer = opened(hub, frozenset({"requests"}))
    hub.report(SOURCE, RequestsReceived((RequestActivity(request=1, id="\ud800ä\n", received=0.0),)))
    (entry,), _ = viewer.read()
    plain = RequestActivity(request=1, id="?ä\n", received=0.0)
    assert entry.data == to_json(RequestsReceived((plain,)))


def test_unread_events_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_UNREAD_BYTES", 10_000)
    hub = ActivityHub()
    viewer, reads = opened(hub), opened(hub)
    for i in range(100):
        hub.report(SOURCE, load(i, "x" * 700))
        assert done(reads.read()[0]) == [i]
    entries, dropped = viewer.read()
    assert done(entries) == list(range(dropped, 100))
    assert 85 < dropped < 95
    assert viewer.read() == ([], 0)


def test_a_sleeping_viewer_is_woken_once() -> None:
    hub = ActivityHub()
    woken: list[int] = []
    viewer = hub.open(LOADS, None, lambda: woken.append(1))
    hub.report(SOURCE, load(1))
    assert not woken
    viewer.sleep()  # there is something already
    assert len(woken) == 1
    viewer.read()
    viewer.sleep()
    for i in range(3):
        hub.report(SOURCE, load(i))
    assert len(woken) == 2
    viewer.read()
    viewer.sleep()
    viewer.sleep()  # after a timeout of its own
    hub.close()
    assert len(woken) == 3
    assert viewer.is_over


def test_instances_are_told_what_is_watched() -> None:
    hub = ActivityHub()
    early, late = Instance(), Instance("m_1")
    hub.add_instance(early)
    viewer = opened(hub, frozenset({"steps"}))
    hub.add_instance(late)
    another = opened(hub, frozenset({"steps", "blocks"}))
    same = opened(hub, frozenset({"blocks"}))  # told again: a viewer of blocks begins with all of them
    for one in (another, same, viewer):
        one.close()
    both = {"steps", "blocks"}
    assert early.told == [{"steps"}, both, both, {"steps"}, set()]
    assert late.told == early.told
    hub.remove_instance(late)
    assert [source.instance for source, _ in hub.describe()] == ["m_0"]


def test_a_viewer_of_a_key_learns_whose_requests_are_whose() -> None:
    hub = ActivityHub()
    viewer = opened(hub, frozenset({"steps"}), "alice")
    assert hub.kinds == {"steps", "requests"}
    viewer.close()
    assert hub.kinds == frozenset()


def test_there_are_so_many_viewers_and_no_more() -> None:
    hub = ActivityHub()
    for _ in range(hub_module.MAX_VIEWERS_OF_A_KEY):
        opened(hub, LOADS, "alice")
    with pytest.raises(TritonError, match="this API key already has 4 viewers") as refused:
        opened(hub, LOADS, "alice")
    assert refused.value.code is ErrorCode.UNAVAILABLE
    while len(hub._viewers) < hub_module.MAX_VIEWERS:
        opened(hub)
    with pytest.raises(TritonError, match="this server already has 32 viewers"):
        opened(hub)


def test_reports_of_many_threads() -> None:
    hub = ActivityHub()
    viewer, found = opened(hub), list[Entry]()

    def report(thread: int) -> None:
        for i in range(500):
            hub.report(Source(str(thread)), load(i))

    threads = [threading.Thread(target=report, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while len(found) < 2000:
        entries, dropped = viewer.read()
        assert dropped == 0
        found += entries
    for thread in threads:
        thread.join()
    assert [entry.sequence for entry in found] == list(range(1, 2001))
    for thread_number in range(4):
        assert done([entry for entry in found if entry.source.model == str(thread_number)]) == list(range(500))


def test_a_finalizer_reports_while_its_thread_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run when an entry is allocated, and asyncio logs exceptions that nobody retrieved."""
    hub = ActivityHub()
    viewer, garbage = opened(hub), [load(2)]

    def allocate(*fields: Any) -> Entry:
        if garbage:
            hub.report(SOURCE, garbage.pop())
        return Entry(*fields)

    monkeypatch.setattr(hub_module, "Entry", allocate)
    thread = threading.Thread(target=hub.report, args=(SOURCE, load(1)), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    entries, _ = viewer.read()
    assert [entry.sequence for entry in entries] == [1, 2]
    assert done(entries) == [2, 1]


# --- backends that report nothing -------------------------------------------------------------------------------------

REFUSING_BACKEND = """
from llmbackend.core.backend_api import internal

def TRITONBACKEND_ModelInstanceExecute(instance, requests):
    raise internal("not today")

def LLMBACKEND_ModelInstanceWatch(instance, kinds):
    raise internal("not watched either")

def LLMBACKEND_ModelInstanceDescribe(instance):
    raise internal("not described either")
"""


def test_the_host_says_which_requests_an_instance_has(tmp_path: Path) -> None:
    STAGE.clear()
    repository = Repository(tmp_path)
    repository.backend("keeping", KEEPING_BACKEND)
    repository.model("kept", "keeping")
    with serving(repository, "kept") as server:
        before = send(server, "kept", id="before", tenant=Tenant("alice"))
        STAGE.wait("executed before")
        viewer = server.watch(frozenset({"requests"}), lambda: None)
        ((source, instance),) = server.describe_instances()
        assert source == Source("kept", "1", "kept_0")
        (request,) = instance.requests
        assert (request.id, request.key, request.state, request.prompt_tokens) == ("before", "alice", "running", None)
        after = send(server, "kept", id="after" * 100)
        STAGE.wait("executed " + "after" * 100)
        for _, one in STAGE.kept:
            one.new_response().send(ResponseFlag.FINAL)
            one.release()
        for client in (before, after):
            client.responses()
        received, first_end, second_end = [json.loads(entry.data) for entry in viewer.read()[0]]
        assert [one["id"] for one in received["received"]] == [("after" * 100)[:MAX_ID_CHARACTERS]]
        number = received["received"][0]["request"]
        assert [end["ended"]["request"] for end in (first_end, second_end)] == [request.request, number]
        assert first_end["ended"]["output_tokens"] is None
        assert server.describe_instances()[0][1].requests == ()
        viewer.close()
        STAGE.clear()
        del request, instance, before, after, one, client


def test_a_backend_that_fails_to_report_is_served_all_the_same(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.backend("refusing", REFUSING_BACKEND)
    repository.model("refused", "refusing")
    with serving(repository, "refused") as server:
        viewer = server.watch(frozenset({"steps", "requests"}), lambda: None)
        assert [one.state for _, one in server.describe_instances()] == ["ready"]
        assert "not today" in send(server, "refused").error().message
        viewer.close()


def test_states_of_versions(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.backend("keeping", KEEPING_BACKEND)
    repository.model("kept", "keeping")
    repository.model("broken", "missing")
    with serving(repository) as server:
        viewer = server.watch(frozenset({"model"}), lambda: None)
        server.load_model("kept")
        with pytest.raises(TritonError):
            server.load_model("broken")
        told = [(entry.source.model, json.loads(entry.data)) for entry in viewer.read()[0]]
        assert [(model, event["state"]) for model, event in told] == [
            ("kept", "LOADING"), ("kept", "READY"), ("broken", "LOADING"), ("broken", "UNAVAILABLE"),
        ]  # fmt: skip
        assert "missing" in told[-1][1]["reason"]
        viewer.close()
