"""Background responses over two servers with one Redis: one is killed, the other one goes on with all of them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_background_restart import BODY, TEMPLATE, create, kill, read, said
from tests.frontends.journals.conftest import redis_port, redis_url
from tests.frontends.responses_api.event_reader import events_of
from tests.helpers.server_process import ServerProcess, start_server, stop_server, write_mock_model

pytestmark = pytest.mark.slow
__all__ = ["redis_port", "redis_url"]  # fixtures

UNSEEDED = {"seed": None}


@pytest.fixture
def servers(tmp_path: Path, redis_url: str) -> Iterator[list[ServerProcess]]:
    write_mock_model(tmp_path / "models", "mock", chat_template=TEMPLATE, mock_step_ms=15)
    arguments = ("--model-repository", str(tmp_path / "models"), "--response-store", redis_url)
    with ThreadPoolExecutor(2) as threads:
        started = list(threads.map(lambda _: start_server(*arguments), range(2)))
    yield started
    for server in started:
        if server.process.poll() is None:
            stop_server(server)


def begin_stream(server: ServerProcess, at_most: int, **fields: Any) -> list[dict[str, Any]]:
    """The first events of a background response that is streamed to the client that began it."""
    found: list[dict[str, Any]] = []
    data = b""
    body = BODY | {"stream": True} | fields
    with httpx.stream("POST", f"http://{server.http}/v1/responses", json=body, timeout=30) as answer:
        for piece in answer.iter_raw():
            whole, _, data = (data + piece).rpartition(b"\n\n")
            found += events_of(whole + b"\n\n") if whole else []
            if len(found) >= at_most:
                break
    return found


def test_a_second_server_goes_on_with_the_responses_of_one_that_was_killed(servers: list[ServerProcess]) -> None:
    first, second = servers
    whole_id = create(second)
    whole = read(second, whole_id)

    polled, joined = create(first), create(first)
    begun = begin_stream(first, 12)
    streamed = str(begun[0]["response"]["id"])
    unseeded = begin_stream(first, 8, **UNSEEDED)
    with ThreadPoolExecutor(1) as threads:
        follower = threads.submit(read, second, joined)  # on the other server, while the first one writes it
        found = read(first, polled, at_most=15)
        kill(first)
        found += read(second, polled, found[-1]["sequence_number"])
        rest = read(second, streamed, begun[-1]["sequence_number"])
        of_unseeded = unseeded + read(second, str(unseeded[0]["response"]["id"]), unseeded[-1]["sequence_number"])
        followed = follower.result(60)

    for events, id in ((found, polled), (begun + rest, streamed), (followed, joined)):
        assert said(events, id) == said(whole, whole_id)
        assert [event["sequence_number"] for event in events] == list(range(len(whole)))
        assert httpx.get(f"http://{second.http}/v1/responses/{id}").json()["status"] == "incomplete"
    assert [event["sequence_number"] for event in of_unseeded] == list(range(len(of_unseeded)))
    assert of_unseeded[-1]["type"] == "response.incomplete"
    assert of_unseeded == read(second, str(unseeded[0]["response"]["id"]))
