"""What request bodies hold while they arrive: a budget for all, a share for each client, and all of it given back."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator

import httpx
import pytest

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.frontends.http.request_body import BodyBudget
from llmbackend.frontends.limits import FrontendLimits, InferenceLimits
from tests.helpers.kserve_runner import Running
from tests.helpers.waiting import eventually

MIB = 1 << 20
NO_ROOM = "the server has no memory for the rest of this request's body"


HOST_OPTIONS = {
    "max_input_size_bytes": MIB,
    "limits": FrontendLimits(inference=InferenceLimits(max_body_memory_bytes=1)),
}


@pytest.fixture(autouse=True)
def all_is_given_back(running: Running) -> Iterator[None]:
    yield
    eventually(lambda: running.gate.bodies.held_bytes == 0)
    running.wait_until_nothing_is_open()


def refused(budget: BodyBudget, owner: str, size_bytes: int) -> bool:
    try:
        budget.take(owner, size_bytes)
    except TritonError as error:
        assert error.code is ErrorCode.UNAVAILABLE and error.message.startswith(NO_ROOM)
        return True
    return False


def test_a_client_holds_no_more_than_it_leaves_free() -> None:
    budget = BodyBudget(1200)
    assert not refused(budget, "a", 600) and refused(budget, "a", 1)
    assert not refused(budget, "b", 300) and refused(budget, "b", 1)
    assert not refused(budget, "c", 150)
    budget.take("a", -600)
    assert not refused(budget, "b", 75) and budget.held_bytes == 525
    budget.take("b", -375)
    budget.take("c", -150)
    assert budget.held_bytes == 0 and not budget._held


def test_there_is_always_room_for_one_body_of_the_largest_size() -> None:
    budget = BodyBudget(10)
    budget.raise_to_fit(100)
    budget.take("a", 200)
    assert refused(budget, "a", 1)


def unfinished(running: Running, path: str, size_bytes: int, total_bytes: int = MIB) -> socket.socket:
    """A body of which `size_bytes` have been sent."""
    host, port = running.http.split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {total_bytes}\r\n\r\n"
    connection.sendall(head.encode() + b" " * size_bytes)
    return connection


PATHS = ("/v2/models/identity/infer", "/v2/models/llm/generate", "/v2/repository/models/spare/load", "/v1/completions")


@pytest.mark.parametrize("path", PATHS)
def test_unfinished_bodies_of_a_client_are_refused_beyond_its_share(
    running: Running, http: httpx.Client, path: str
) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):  # of 4 MiB, 2 are the client's
            stack.enter_context(unfinished(running, path, 600 << 10))
        eventually(lambda: running.gate.bodies.held_bytes == 3 * (600 << 10))
        late = stack.enter_context(unfinished(running, path, 600 << 10))
        answer = late.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in answer.lower()
        assert NO_ROOM.encode() in answer
        assert running.gate.bodies.held_bytes <= 2 * MIB
        assert http.post("/v2/models/llm/generate", json={"text_input": "n=1"}).status_code == 200


def test_a_packed_body_is_counted_by_what_it_unpacks_to(running: Running, http: httpx.Client) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    content = json.dumps({"inputs": [tensor]}).encode().ljust(900 << 10)
    url, headers = "/v2/models/identity/infer", {"content-encoding": "gzip"}
    assert http.post(url, content=gzip.compress(content), headers=headers).status_code == 200
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(unfinished(running, PATHS[0], 700 << 10))
        eventually(lambda: running.gate.bodies.held_bytes == 2 * (700 << 10))
        packed = http.post(url, content=gzip.compress(content), headers=headers)
        assert packed.status_code == 503 and packed.json()["error"].startswith(NO_ROOM)


def test_a_body_is_given_back_once_its_stream_runs(running: Running, http: httpx.Client) -> None:
    body = json.dumps({"text_input": "n=40 sleep=50"}).encode().ljust(500 << 10)
    with http.stream("POST", "/v2/models/llm/generate_stream", content=body) as response:
        assert next(response.iter_lines()).startswith("data: ")
        assert running.gate.bodies.held_bytes == 0


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_openai_bodies_may_be_packed(http: httpx.Client, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    def post(content: bytes, encoding: str) -> httpx.Response:
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        return http.post("/v1/completions", content=content, headers=headers)

    body = json.dumps({"model": "llm", "prompt": "n=2"}).encode()
    for sent in (post(body, "identity"), post(pack(body), encoding), post(pack(body), encoding.upper())):
        assert sent.status_code == 200 and sent.json()["choices"][0]["text"]
    bomb = post(pack(bytes(8 * MIB)), encoding)
    assert bomb.status_code == 413 and bomb.json()["error"]["code"] == "content_too_large"
    cut = post(pack(body)[:-6], encoding)
    assert cut.status_code == 400 and "incomplete" in cut.json()["error"]["message"]
    unknown = post(body, "br")
    assert unknown.status_code == 415
    assert unknown.json()["error"]["message"] == "Content-Encoding is 'br', expected one of gzip, deflate, identity"
