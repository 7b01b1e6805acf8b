"""Cancellation by every means and in every state that a frontend sees: once, told to the client, nothing left."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.frontends.http.event_stream import EventStream
from llmbackend.frontends.http.request_scope import PRESENCE, ClientPresence
from llmbackend.frontends.inference_gate import InferenceGate
from tests.helpers.fake_llm_server import FakeLlmServer
from tests.helpers.kserve_runner import Running
from tests.helpers.kserve_scripted import RECORD
from tests.helpers.openai_live_server import serve_openai
from tests.helpers.waiting import eventually

LONG = "n=1000 sleep=20"


@pytest.fixture(autouse=True)
def nothing_is_left(running: Running) -> Iterator[None]:
    yield
    running.wait_until_nothing_is_open()


@pytest.fixture(scope="module")
def stub(running: Running) -> Iterator[Any]:
    with grpc.insecure_channel(running.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def connect(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def http_request(path: str, body: dict[str, Any], announced_bytes: int = 0) -> bytes:
    content = json.dumps(body).encode()
    length = announced_bytes or len(content)
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}"
    return f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode() + content


def grpc_request(model: str, request_id: str, words: str, shape: list[int]) -> Any:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=shape).contents.bytes_contents.append(words.encode())
    return request


def cancelled_once(request_id: str) -> bool:
    return RECORD.cancelled[request_id].wait(10) and RECORD.cancels[request_id] == 1


# --- disconnects ------------------------------------------------------------------------------------------------------


def slow_infer(request_id: str) -> tuple[str, dict[str, Any]]:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["slow"]}
    return "/v2/models/textid/infer", {"id": request_id, "inputs": [tensor]}


def long_generate(request_id: str) -> tuple[str, dict[str, Any]]:
    return "/v2/models/llm/generate", {"id": request_id, "text_input": LONG}


def long_stream(request_id: str) -> tuple[str, dict[str, Any]]:
    return "/v2/models/llm/generate_stream", {"id": request_id, "text_input": LONG}


def silent_stream(request_id: str) -> tuple[str, dict[str, Any]]:
    return "/v2/models/llm/generate_stream", {"id": request_id, "text_input": "n=1 sleep=20000"}


@pytest.mark.parametrize("kind", [slow_infer, long_generate, long_stream, silent_stream])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_cancels_once(running: Running, kind: Any, how: str) -> None:
    request_id = f"{how}-{kind.__name__}"
    with connect(running.http) as connection:
        connection.sendall(http_request(*kind(request_id)))
        assert RECORD.began[request_id].wait(10)
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert cancelled_once(request_id)


def test_a_client_that_leaves_behind_pipelined_requests_cancels_the_running_one(running: Running) -> None:
    with connect(running.http) as connection:
        connection.sendall(http_request(*long_stream("piped-1")) + http_request(*long_stream("piped-2")))
        assert RECORD.began["piped-1"].wait(10)
    assert cancelled_once("piped-1") and not RECORD.began["piped-2"].is_set()


@pytest.mark.parametrize("path", ["/v2/models/textid/infer", "/v2/models/llm/generate_stream", "/v1/completions"])
def test_a_client_that_leaves_while_it_sends_its_body_leaves_nothing(running: Running, path: str) -> None:
    with connect(running.http) as connection:
        connection.sendall(http_request(path, {"text_input": "n=1"}, announced_bytes=10_000))
        time.sleep(0.05)  # the handler is reading


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
@pytest.mark.parametrize("said", ["forever", "silent"])
def test_an_openai_client_that_leaves_cancels_every_choice(endpoint: str, streaming: bool, said: str) -> None:
    host = FakeLlmServer()
    gate = InferenceGate(host)  # type: ignore[arg-type]
    chat = {"messages": [{"role": "user", "content": said}]}
    body = {"model": "fake", "stream": streaming, **(chat if "chat" in endpoint else {"prompt": [said] * 3})}
    with serve_openai(host, gate=gate) as url:
        with connect(url) as connection:
            connection.sendall(http_request(f"/v1/{endpoint}", body))
            choices = 1 if "chat" in endpoint else 3
            eventually(lambda: len(host.handles) == choices)
        assert all(handle.cancelled.wait(10) for handle in host.handles)
        eventually(lambda: gate.open_inferences == 0)


def test_one_refused_prompt_of_several_cancels_the_others() -> None:
    host = FakeLlmServer()
    gate = InferenceGate(host)  # type: ignore[arg-type]
    with serve_openai(host, gate=gate) as url:
        body = {"model": "fake", "prompt": ["silent", "silent", "overloaded"]}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=20)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert len(host.handles) == 2 and all(handle.cancelled.wait(10) for handle in host.handles)
        late = httpx.post(f"{url}/v1/completions", json={**body, "prompt": ["forever", "too long"]}, timeout=20)
        assert late.status_code == 400 and host.handles[2].cancelled.wait(10)
        assert gate.open_inferences == 0


def test_a_stream_whose_head_cannot_be_sent_is_closed_all_the_same() -> None:
    closed: list[bool] = []

    async def pieces() -> AsyncGenerator[bytes, None]:
        yield b"never"

    async def send(message: Any) -> None:
        raise OSError("gone")

    async def run() -> None:
        scope = {"type": "http", "method": "POST", PRESENCE: ClientPresence()}
        await EventStream(pieces(), {}, on_close=lambda: closed.append(True))(scope, None, send)  # type: ignore[arg-type]

    asyncio.run(run())
    assert closed == [True]


# --- gRPC -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_unary_call_that_ends_early_cancels(stub: Any, how: str) -> None:
    request_id = f"unary-{how}"
    call = stub.ModelInfer.future(
        grpc_request("textid", request_id, "slow", [1, 1]), timeout=0.3 if how == "deadline" else 20
    )
    assert RECORD.began[request_id].wait(10)
    if how == "cancel":
        call.cancel()
    assert cancelled_once(request_id)


@pytest.mark.parametrize("how", ["cancel", "deadline", "channel"])
def test_a_stream_that_ends_early_cancels_all_its_requests(running: Running, how: str) -> None:
    names = [f"{how}-{index}" for index in range(3)]
    words_of = [LONG, LONG, "n=1 sleep=20000"]
    requests = [grpc_request("llm", name, words, [1]) for name, words in zip(names, words_of, strict=True)]
    with grpc.insecure_channel(running.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(held_open(requests), timeout=0.5 if how == "deadline" else 20)
        assert all(RECORD.began[name].wait(10) for name in names)
        if how == "cancel":
            call.cancel()
        if how != "channel":
            assert all(cancelled_once(name) for name in names)
    assert all(cancelled_once(name) for name in names)


def held_open(requests: list[Any]) -> Iterator[Any]:
    yield from requests
    threading.Event().wait(3)


def test_a_half_close_ends_nothing(stub: Any) -> None:
    call = stub.ModelStreamInfer(iter([grpc_request("llm", "half", "n=10 sleep=20", [1])]), timeout=20)
    assert len(list(call)) == 10 and RECORD.cancels["half"] == 0


# --- stop by id -------------------------------------------------------------------------------------------------------


def stop(http: httpx.Client, request_id: str, path: str = "/v2/models/llm/stop") -> tuple[int, Any]:
    answer = http.post(path, json={"id": request_id})
    return answer.status_code, answer.json()


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/llm/stop",
        "/v2/models/llm/stopInfer",
        "/v2/models/llm/versions/1/stop",
        "/v2/models/llm/versions/1/stopInfer",
    ],
)
def test_a_stopped_stream_is_told(http: httpx.Client, path: str) -> None:
    request_id = f"stop {path}"
    with http.stream("POST", long_stream("")[0], json=long_stream(request_id)[1]) as answer:
        lines = answer.iter_lines()
        assert " tok0" in next(lines)
        assert stop(http, request_id, path) == (200, {"id": request_id, "cancelled": 1})
        last = [line for line in lines if line][-1]
    assert json.loads(last[6:]) == {"error": "Client requested to stop"}
    assert RECORD.cancels[request_id] == 1
    assert stop(http, request_id, path) == (200, {"id": request_id, "cancelled": 0})


def test_stop_finds_requests_of_every_protocol(running: Running, http: httpx.Client, stub: Any) -> None:
    got: dict[str, Any] = {}

    def run(name: str, work: Any) -> threading.Thread:
        thread = threading.Thread(target=lambda: got.update({name: work()}))
        thread.start()
        return thread

    requests = iter([grpc_request("llm", "same", LONG, [1])])
    threads = [
        run(
            "generate",
            lambda: httpx.post(f"http://{running.http}/v2/models/llm/generate", json=long_generate("same")[1]),
        ),
        run("stream", lambda: [message.error_message for message in stub.ModelStreamInfer(requests, timeout=20)]),
    ]
    eventually(lambda: running.gate.open_inferences == 2)
    assert stop(http, "same") == (200, {"id": "same", "cancelled": 2})
    for thread in threads:
        thread.join(20)
    assert got["generate"].status_code in (200, 400) and "error" in got["generate"].json()
    # The second is the host's, for a request that has not left its queue.
    assert got["stream"][-1] in ("Client requested to stop", "Request cancelled")


def test_a_stopped_inference_is_told(running: Running, http: httpx.Client, stub: Any) -> None:
    path, body = slow_infer("stop-infer")
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(f"http://{running.http}{path}", json=body)))
    thread.start()
    call = stub.ModelInfer.future(grpc_request("textid", "stop-unary", "slow", [1, 1]), timeout=20)
    for request_id in ("stop-infer", "stop-unary"):
        assert RECORD.began[request_id].wait(10)
        assert stop(http, request_id, "/v2/models/textid/stop")[1]["cancelled"] == 1
    thread.join(20)
    assert (answers[0].status_code, answers[0].json()) == (400, {"error": "slow request ended"})
    assert call.exception(20).code() is grpc.StatusCode.CANCELLED


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v2/models/nosuch/stop", {"id": "x"}, 404),
        ("/v2/models/llm/versions/9/stop", {"id": "x"}, 404),
        ("/v2/models/llm/versions/x/stop", {"id": "x"}, 404),
        ("/v2/models/llm/stop", {"id": ""}, 400),
        ("/v2/models/llm/stop", {"id": 7}, 500),
        ("/v2/models/llm/stop", {}, 500),
        ("/v2/models/llm/stop", [], 500),
    ],
)
def test_stops_that_are_wrong(http: httpx.Client, path: str, body: Any, status: int) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status and answer.json()["error"]
