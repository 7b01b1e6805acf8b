"""Background responses over the end of their server: killed between two steps, twice, and told to stop."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.frontends.responses_api.event_reader import events_of
from tests.helpers.server_process import ServerProcess, start_server, stop_server, write_mock_model

pytestmark = pytest.mark.slow

TOKENS = 120
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
BODY: dict[str, Any] = {
    "model": "mock",
    "input": "Tell me something.",
    "background": True,
    "max_output_tokens": TOKENS,
    "temperature": 1,
    "seed": 7,
    "ignore_eos": True,
    "logit_bias": {str(token): 100 for token in range(97, 117)},
    "frequency_penalty": 0.7,
}
Serve = Callable[[], ServerProcess]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    for name in ("mock", "other"):
        write_mock_model(tmp_path / "models", name, chat_template=TEMPLATE, mock_step_ms=10)
    servers: list[ServerProcess] = []

    def start() -> ServerProcess:
        store = f"sqlite:{tmp_path / 'store'}"
        servers.append(start_server("--model-repository", str(tmp_path / "models"), "--response-store", store))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            stop_server(server)


def create(server: ServerProcess, **fields: Any) -> str:
    answer = httpx.post(f"http://{server.http}/v1/responses", json=BODY | fields, timeout=20)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def read(server: ServerProcess, id: str, after: int = -1, at_most: int | None = None) -> list[dict[str, Any]]:
    """The events behind a number, until their end, the server's, or there are enough."""
    found: list[dict[str, Any]] = []
    url = f"http://{server.http}/v1/responses/{id}?stream=true" + (f"&starting_after={after}" if after >= 0 else "")
    try:
        with httpx.stream("GET", url, timeout=20) as answer:
            assert answer.status_code == 200, answer.read()
            data = b""
            for piece in answer.iter_raw():
                data += piece
                whole, _, data = data.rpartition(b"\n\n")
                found += events_of(whole + b"\n\n") if whole else []
                if at_most is not None and len(found) >= at_most:
                    break
    except httpx.RemoteProtocolError:
        pass  # the server is gone
    return found


def kill(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    assert server.process.stdout is not None
    server.process.stdout.close()


def said(events: list[dict[str, Any]], id: str) -> Any:
    """Without what differs from one request to the next."""
    text = json.dumps(events).replace(id.removeprefix("resp_"), "ID")
    found = json.loads(text)
    for event in found:
        response = event.get("response", {})
        response.pop("created_at", None)
        if response.get("usage"):
            del response["usage"]["input_tokens_details"]  # how much of the prompt an engine has in its cache
    return found


def test_responses_go_on_where_their_server_was_killed_or_stopped(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    whole_id = create(server)
    whole = read(server, whole_id)
    assert whole[-1]["type"] == "response.incomplete" and len(whole) > TOKENS // 2
    assert whole[-1]["response"]["usage"]["output_tokens"] == TOKENS

    id, lost = create(server), create(server, model="other")
    found = read(server, id, at_most=20)
    lost_events = read(server, lost, at_most=5)
    kill(server)
    (tmp_path / "models" / "other").rename(tmp_path / "other")
    server = serve()
    found += read(server, id, found[-1]["sequence_number"], at_most=20)
    lost_events += read(server, lost, lost_events[-1]["sequence_number"])
    assert lost_events[-1]["type"] == "response.failed"
    assert "The model 'other' does not exist" in lost_events[-1]["response"]["error"]["message"]
    kill(server)
    server = serve()
    found += read(server, id, found[-1]["sequence_number"], at_most=20)
    assert stop_server(server) == 0
    server = serve()
    found += read(server, id, found[-1]["sequence_number"])

    assert said(found, id) == said(whole, whole_id)
    assert [event["sequence_number"] for event in found] == list(range(len(whole)))
    assert read(server, id) == found
    stored = httpx.get(f"http://{server.http}/v1/responses/{id}").json()
    assert stored == found[-1]["response"]
    assert httpx.get(f"http://{server.http}/v1/responses/{lost}").json() == lost_events[-1]["response"]
