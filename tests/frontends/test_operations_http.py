"""/v2/engine over real sockets: cancel and kill, what keys use, what the server runs with; and who may."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.http_app import create_http_app
from llmbackend.frontends.operations.router import ServerFacts, create_operations_router
from tests.helpers.engine_events import EventsViewer
from tests.helpers.server_process import ServerProcess, running_server, write_mock_model
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow

KEYS = """
alice:sk-alice rpm=20 tpm=100000 concurrency=7
bob:sk-bob
root:sk-root role=operator
"""
LONG = {"model": "slow", "prompt": "hello", "max_tokens": 400, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("operations")
    write_mock_model(root / "repository", "slow", mock_step_ms=40)
    (root / "keys").write_text(KEYS)
    with running_server(
        f"--model-repository={root / 'repository'}",
        f"--api-key-file={root / 'keys'}",
        "--http-restricted-api=trace:trace-key=sk-secret-of-a-header",
        "--cache-config=local,size=1048576",
        "--allow-fault-injection=true",
        "--id=operated",
    ) as started:
        yield started


def client_of(server: ServerProcess, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=f"http://{server.http}", headers=headers, timeout=30)


@pytest.fixture
def operator(server: ServerProcess) -> Iterator[httpx.Client]:
    with client_of(server, "sk-root") as client:
        yield client


@pytest.fixture
def alice(server: ServerProcess) -> Iterator[httpx.Client]:
    with client_of(server, "sk-alice") as client:
        yield client


@contextmanager
def streaming(client: httpx.Client) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    with client.stream("POST", "/v1/completions", json=LONG) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        yield lines


def cancel(client: httpx.Client, number: object) -> httpx.Response:
    return client.post(f"/v2/engine/requests/{number}/cancel")


@contextmanager
def watching(server: ServerProcess, key: str, query: str = "interval_ms=50") -> Iterator[EventsViewer]:
    viewer = EventsViewer(server.http, query, key)
    try:
        yield viewer
    finally:
        viewer.close()


def number_in_flight(server: ServerProcess, key: str) -> int:
    """Of the one request that the key sees."""
    with watching(server, key) as viewer:
        (number,) = viewer.numbers()
        return number


def use_of(client: httpx.Client, name: str) -> dict[str, Any]:
    (row,) = (row for row in client.get("/v2/engine/access").json()["keys"] if row["name"] == name)
    return dict(row)


def test_an_operator_cancels_the_request_of_a_client(
    server: ServerProcess, operator: httpx.Client, alice: httpx.Client
) -> None:
    with streaming(alice) as lines, client_of(server, "sk-bob") as bob:
        assert use_of(operator, "alice")["concurrent_requests"] == 1
        number = number_in_flight(server, "sk-root")
        assert cancel(bob, number).status_code == 404
        assert cancel(operator, number).json() == {"request": number}
        assert "Request was cancelled" in "".join(lines)
    assert cancel(operator, number).json() == {"error": f"request {number} is not in flight"}
    eventually(lambda: use_of(operator, "alice")["concurrent_requests"] == 0)


def test_a_key_cancels_its_own_request(server: ServerProcess, alice: httpx.Client) -> None:
    with streaming(alice) as lines:
        assert cancel(alice, number_in_flight(server, "sk-alice")).status_code == 200
        assert "Request was cancelled" in "".join(lines)


@pytest.mark.parametrize("number", ["abc", "-1", "1.5", "9" * 19, "%C2%B2"])
def test_a_wrong_number_is_refused(operator: httpx.Client, number: str) -> None:
    answer = cancel(operator, number)
    assert answer.status_code == 400 and "expected the number of a request" in answer.json()["error"]


def test_a_killed_engine_loses_no_token(operator: httpx.Client, alice: httpx.Client) -> None:
    body = LONG | {"max_tokens": 30, "stream": False}
    whole = alice.post("/v1/completions", json=body).json()["choices"][0]["text"]
    pieces = []
    with alice.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                if len(pieces) == 5:
                    killed = operator.post("/v2/engine/instances/slow/1/slow_0/kill")
    assert killed.status_code == 200 and killed.json()["instance"] == "slow_0" and len(killed.json()["pids"]) == 1
    assert "".join(pieces) == whole
    unknown = operator.post("/v2/engine/instances/slow/1/other/kill")
    assert unknown.status_code == 404 and "its instances are slow_0" in unknown.json()["error"]
    assert operator.post("/v2/engine/instances/slow/one/slow_0/kill").status_code == 400


def test_the_log_is_among_the_events_for_operators(server: ServerProcess, alice: httpx.Client) -> None:
    with watching(server, "sk-root", "kinds=log&interval_ms=50") as viewer, client_of(server, "sk-root") as operator:

        def texts() -> list[str]:
            return [line["text"] for line in viewer.of("log")]

        viewer.wait_for(lambda: any(text.startswith("Started HTTPService at ") for text in texts()))
        num_before = len(texts())
        (pid,) = operator.post("/v2/engine/instances/slow/1/slow_0/kill").json()["pids"]
        killed = f"killed process {pid} of instance 'slow_0' of model 'slow'"
        viewer.wait_for(lambda: killed in texts()[num_before:])
        (line,) = (line for line in viewer.of("log") if line["text"] == killed)
        assert line["level"] == "WARNING" and abs(time.time() - line["time"]) < 600
        assert {event.name for event in viewer.events} == {"snapshot", "log"}
    refused = alice.get("/v2/engine/events", params={"kinds": "log"})
    assert refused.status_code == 403 and "role 'operator'" in refused.json()["error"]


def test_what_keys_may_use_and_have_used(operator: httpx.Client, alice: httpx.Client) -> None:
    before = use_of(operator, "alice")
    alice.post("/v1/completions", json=LONG | {"max_tokens": 5, "stream": False}).raise_for_status()
    after = use_of(operator, "alice")
    assert after["limits"] == {"requests_per_minute": 20, "tokens_per_minute": 100000, "concurrent_requests": 7}
    assert after["total"]["accepted"] == before["total"]["accepted"] + 1
    assert after["total"]["generated_tokens"] == before["total"]["generated_tokens"] + 5
    assert 0 < after["left"]["requests"] < 20 and 0 < after["left"]["tokens"] <= 100000
    bob = use_of(operator, "bob")
    assert set(bob["limits"].values()) == {None} and set(bob["left"].values()) == {None} and bob["role"] == "user"
    report = operator.get("/v2/engine/access").text
    assert json.loads(report)["num_keys"] == 3 and "sk-" not in report


def test_settings_show_flags_and_no_secret(operator: httpx.Client) -> None:
    answer = operator.get("/v2/engine/settings")
    report = answer.json()
    assert report["name"] == "operated" and report["needs_key"] and report["allows_kill"] and not report["allows_load"]
    assert 0 < time.time() - report["started"] < 600
    flags = {row["flag"]: row["value"] for row in report["flags"]}
    assert flags["--allow-fault-injection"] == "true" and flags["--id"] == "operated"
    assert flags["--http-restricted-api"] == flags["--cache-config"] == "(not shown)"
    assert "--grpc-keepalive-time" not in flags and "sk-" not in answer.text


@pytest.mark.parametrize("path", ["settings", "access", "instances/slow/1/slow_0/kill"])
def test_only_operators_may(server: ServerProcess, alice: httpx.Client, path: str) -> None:
    method = "POST" if path.endswith("kill") else "GET"
    refused = alice.request(method, f"/v2/engine/{path}")
    assert refused.status_code == 403 and "role 'operator'" in refused.json()["error"]
    with client_of(server, "") as nobody:
        assert nobody.request(method, f"/v2/engine/{path}").status_code == 401
        assert cancel(nobody, 1).status_code == 401


def app_without_keys(facts: ServerFacts | None = None) -> Starlette:
    host = InferenceServer(ServerOptions())
    context = FrontendContext.of(host)
    return create_http_app(context, [create_operations_router(host, context.gate, context.access, facts)])


def test_without_the_flag_nothing_is_killed() -> None:
    app = app_without_keys()

    async def ask() -> tuple[httpx.Response, Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host") as client:
            killed = await client.post("/v2/engine/instances/m/1/m_0/kill")
            return killed, (await client.get("/v2/engine/access")).json()

    killed, report = asyncio.run(ask())
    assert killed.status_code == 403 and "--allow-fault-injection" in killed.json()["error"]
    assert report == {"needs_key": False, "num_keys": 0, "keys": []}
