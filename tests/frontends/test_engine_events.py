"""/v2/engine/events over real sockets: what viewers see, whose requests, what happens to those that do not read."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmbackend.core.activity import hub
from llmbackend.core.activity.messages import LoadActivity
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.access.settings import AccessSettings
from tests.helpers.engine_events import PATH, EventsViewer
from tests.helpers.kserve_runner import Running
from tests.helpers.server_process import write_mock_model
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

KEYS = "alice:sk-alice,bob:sk-bob,root:sk-root role=operator"
MODELS: dict[str, dict[str, Any]] = {
    "mock": {"block_size": 8, "num_kv_blocks": 64, "max_num_seqs": 8, "mock_step_ms": 2},
    "other": {"transport": "inline"},
}


class Clients:
    """Requests that run on threads."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self._pool = ThreadPoolExecutor(16)

    def ask(
        self, key: str = "sk-root", prompt: str | list[str] = "hello", max_tokens: int = 20, **fields: Any
    ) -> Future[Any]:
        body = {"model": "mock", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return self._pool.submit(self._ask, key, body | fields)

    def _ask(self, key: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://{self.running.http}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {key}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def refusal(self, query: str, key: str = "sk-root") -> tuple[int, str]:
        request = urllib.request.Request(
            f"http://{self.running.http}{PATH}?{query}", headers={"authorization": f"Bearer {key}"}
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        with refused.value as answer:
            return answer.code, json.load(answer)["error"]

    def close(self) -> None:
        self._pool.shutdown()


def start_host(root: Path, access: AccessControl) -> InferenceServer:
    for name, arguments in MODELS.items():
        write_mock_model(root / "repository", name, **arguments)
    options = ServerOptions(
        model_repositories=(root / "repository",), model_control_mode="explicit", startup_models=("mock",)
    )
    host = access.host(options)
    host.start()
    return host


def start(root: Path) -> Running:
    access = AccessControl(AccessSettings(environment_keys=KEYS))
    return Running(root, start=partial(start_host, access=access), access=access)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = start(tmp_path_factory.mktemp("host"))
    yield running
    if not running.is_stopped:
        running.stop()


@pytest.fixture
def clients(running: Running) -> Iterator[Clients]:
    clients = Clients(running)
    yield clients
    clients.close()
    eventually(lambda: not viewers(running))


def viewers(running: Running) -> list[Any]:
    return running.host._services.activity._viewers


@pytest.fixture
def operator(running: Running) -> Iterator[EventsViewer]:
    viewer = EventsViewer(running.http, "interval_ms=50", "sk-root")
    yield viewer
    viewer.close()


def test_a_stream_says_what_the_requests_got(clients: Clients, operator: EventsViewer) -> None:
    instance = operator.snapshot["instances"][0]
    assert {name: instance[name] for name in ("model", "version", "state")} == {
        "model": "mock", "version": "1", "state": "ready",
    }  # fmt: skip
    assert instance["limits"]["num_blocks"] == 64
    assert operator.snapshot["scope"] == "all"
    answers = [clients.ask(prompt="x" * (5 * i + 1), max_tokens=10 + i, user="me").result() for i in range(4)]
    operator.wait_for(lambda: len(operator.ended) >= 4)
    for answer, (number, end) in zip(answers, operator.ended.items(), strict=True):
        request = operator.received[number]
        assert request["key"] == "root"
        assert end["finish_reason"] == answer["choices"][0]["finish_reason"] == "length"
        assert request["prompt_tokens"] == end["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert request["max_tokens"] == end["output_tokens"] == answer["usage"]["completion_tokens"]
        assert operator.output_tokens[number] == end["output_tokens"]
    numbers = [int(event.id.partition("-")[2]) for event in operator.events]
    assert numbers == sorted(numbers)


def test_a_request_with_choices_is_one_request_of_several_rows(clients: Clients, operator: EventsViewer) -> None:
    asked: dict[str, Any] = {"n": 3, "max_tokens": 6, "temperature": 1, "seed": 1}
    usage = clients.ask(prompt="choices whose prompt has blocks", **asked).result()["usage"]
    operator.wait_for(lambda: operator.ended)
    ((number, end),) = operator.ended.items()
    assert (end["prompt_tokens"], end["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert end["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert operator.received[number]["max_tokens"] == 18
    assert max([row[0] for row in step["rows"]].count(number) for step in operator.steps) == 3


def test_an_engine_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    running = start(tmp_path)
    clients, viewer = Clients(running), EventsViewer(running.http, key="sk-root")
    alone = clients.ask(prompt="a long one", max_tokens=150).result()["choices"][0]["text"]
    viewer.wait_for(lambda: len(viewer.ended) == 1)
    answer = clients.ask(prompt="a long one", max_tokens=150)
    viewer.wait_for(lambda: len(viewer.received) == 2 and viewer.output_tokens[max(viewer.received)] > 20)
    pid = viewer.snapshot["instances"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert answer.result()["choices"][0]["text"] == alone
    viewer.wait_for(lambda: len(viewer.ended) == 2)
    lost, ready = viewer.of("engine")
    assert (lost["state"], lost["pid"], lost["num_restarts"]) == ("recovering", None, 1)
    assert "SIGKILL" in lost["reason"]
    assert (ready["state"], ready["recovery_ms"] > 0) == ("ready", True)
    assert ready["pid"] not in (None, pid)
    told = [request for data in viewer.of("requests") for request in data["received"]]
    assert [request["reason"] for request in told] == ["", "", "engine"]
    kinds = [row[1] for step in viewer.steps for row in step["rows"] if row[0] == told[-1]["request"]]
    assert kinds.index("recompute") > kinds.index("decode")
    assert kinds[-1] == "decode"
    later = EventsViewer(running.http, key="sk-root")
    assert later.snapshot["instances"][0]["pid"] == ready["pid"]
    for one in (later, viewer, clients):
        one.close()
    running.stop()


def test_a_key_sees_its_own_requests_alone(running: Running, clients: Clients, operator: EventsViewer) -> None:
    query = "interval_ms=50&kinds=requests,steps,blocks,engine"
    running_before = clients.ask("sk-bob", "bob's first", 200)
    operator.wait_for(lambda: operator.received)
    alice = EventsViewer(running.http, query, "sk-alice")
    answers = [clients.ask(f"sk-{name}", f"{name} {i}", 40) for i in range(6) for name in ("alice", "bob")]
    for answer in [running_before, *answers]:
        answer.result()
    operator.wait_for(lambda: len(operator.ended) == 13)
    own = {number for number, request in operator.received.items() if request["key"] == "alice"}
    alice.wait_for(lambda: own <= alice.ended.keys())
    alice.close()
    assert alice.snapshot["scope"] == "own"
    assert len(own) == 6
    assert alice.numbers() == own
    assert all(alice.output_tokens[number] == 40 for number in own)
    assert {request["key"] for request in alice.received.values()} == {"alice"}


def test_waiting_and_preempted_requests(clients: Clients, operator: EventsViewer) -> None:
    prompts = [f"{i} " * 20 for i in range(14)]  # at once: eight of them get a row
    assert len(clients.ask(prompt=prompts, max_tokens=60).result()["choices"]) == 14
    operator.wait_for(lambda: len(operator.ended) == 14)
    assert "max_num_seqs" in {request["reason"] for request in operator.received.values()}
    preempted = {number for step in operator.steps for number in step["preempted"]}
    assert preempted
    assert preempted == {number for number, end in operator.ended.items() if end["num_preemptions"]}
    assert max(step["num_waiting"] for step in operator.steps) > 0
    assert all(sum(step["blocks"].values()) == 64 for step in operator.steps)


def test_models_that_load_and_unload(running: Running, operator: EventsViewer) -> None:
    running.host.load_model("other")
    operator.wait_for(
        lambda: any(data["model"] == "other" and data["state"] == "READY" for data in operator.of("model"))
    )
    only_other = EventsViewer(running.http, "model=other", "sk-root")
    assert [one["model"] for one in only_other.snapshot["instances"]] == ["other"]
    running.host.unload_model("other")
    operator.wait_for(lambda: len(operator.of("model")) == 4)
    assert [data["state"] for data in operator.of("model")] == ["LOADING", "READY", "UNLOADING", "UNAVAILABLE"]
    only_other.wait_for(lambda: only_other.of("engine"))
    only_other.close()
    assert {data["model"] for data in only_other.of("engine", "model", "steps")} == {"other"}
    assert "stopped" in [data["state"] for data in operator.of("engine")]


def test_nothing_is_on_without_viewers(running: Running, clients: Clients) -> None:
    activity = running.host._services.activity
    eventually(lambda: activity.kinds == frozenset())  # the server sees a moment later that the last viewer left
    before = activity.last_sequence
    clients.ask(max_tokens=30).result()
    assert activity.last_sequence == before
    viewer = EventsViewer(running.http, "kinds=engine", "sk-root")
    clients.ask(max_tokens=30).result()
    viewer.close()
    assert activity.last_sequence == before
    eventually(lambda: activity.kinds == frozenset())


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("kinds=steps,stepz", "query parameter 'kinds' has 'stepz', expected blocks, engine"),
        ("kinds=", "query parameter 'kinds' has '', expected"),
        ("interval_ms=49", "query parameter 'interval_ms' is '49', expected a whole number from 50 to 5000"),
        ("interval_ms=1e3", "query parameter 'interval_ms' is '1e3'"),
        ("interval_ms=", "query parameter 'interval_ms' is ''"),
        ("model=", "query parameter 'model' is empty"),
        ("modell=mock", "query parameter 'modell' is unknown, expected model, kinds, interval_ms"),
    ],
)
def test_a_wrong_query_is_refused(clients: Clients, query: str, expected: str) -> None:
    status, text = clients.refusal(query)
    assert status == 400
    assert expected in text


def test_the_log_is_for_operators(clients: Clients) -> None:
    status, text = clients.refusal("kinds=log", "sk-alice")
    assert status == 403
    assert "operator" in text


def test_there_are_so_many_viewers_and_no_more(running: Running, clients: Clients) -> None:
    of_alice = [EventsViewer(running.http, key="sk-alice") for _ in range(hub.MAX_VIEWERS_OF_A_KEY)]
    status, text = clients.refusal("", "sk-alice")
    assert status == 503
    assert "4 viewers" in text
    for viewer in [EventsViewer(running.http, key="sk-bob"), *of_alice]:
        viewer.close()


def test_who_does_not_read_loses_events_and_delays_nobody(
    running: Running, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More is reported than sockets hold: the viewer that reads late hears how much it lost, and gets a snapshot."""
    monkeypatch.setattr(hub, "MAX_UNREAD_BYTES", 1 << 20)
    host, port = running.http.split(":")
    load = LoadActivity(time=0.0, stage="x" * 10_000, done=0, total=0)
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.settimeout(20)
        idle.connect((host, int(port)))
        head = (f"GET {PATH}?interval_ms=50 HTTP/1.1", "Host: localhost", "Authorization: Bearer sk-root")
        idle.sendall("".join(f"{line}\r\n" for line in (*head, "")).encode())
        eventually(lambda: viewers(running))
        (viewer,) = viewers(running)
        while viewer._hub.last_sequence - viewer._read_to < 200:  # until it is stuck
            viewer._hub.report(hub.Source("mock", "1"), load)
            time.sleep(0.001)
        assert clients.ask(max_tokens=50).result()["usage"]["completion_tokens"] == 50
        received = bytearray()
        while received.count(b"event: snapshot") < 2:
            received += idle.recv(1 << 16)
    lost = re.search(rb'event: dropped\nid: \S+\ndata: \{"events":(\d+)\}', received)
    assert lost is not None and int(lost[1]) > 90


def test_the_stream_ends_with_the_server(running: Running) -> None:
    """The last test: it stops the server."""
    viewer = EventsViewer(running.http, key="sk-root")
    assert running.host.stop(10)
    viewer.wait_until_over()
    assert [data["state"] for data in viewer.of("engine")] == ["stopped"]
    running.stop()
