"""Clients that read slowly or not at all: their requests end, and other clients are not affected."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.backend_api import ResponseFlag, Tensor
from llmbackend.core.messages import InferenceResponse
from llmbackend.frontends.inference import Backlog, Inference, response_bytes
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.limits import FrontendLimits, GrpcLimits, HttpLimits, InferenceLimits
from tests.helpers.fake_llm_server import FakeLlmServer
from tests.helpers.kserve_runner import Running
from tests.helpers.kserve_scripted import RECORD
from tests.helpers.openai_live_server import serve_openai
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slow  # limits of time run out

BUFFER_BYTES = 256 << 10
FLOOD = "n=100000 kib=8"
"""More than sockets and windows hold; the sender does not wait."""
STEADY = "n=20000 kib=64 sleep=1"
"""The same at a pace that leaves an unbounded buffer small until its client's time is over."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = FrontendLimits(inference=InferenceLimits(max_stream_buffer_bytes=BUFFER_BYTES))
    running = Running(tmp_path_factory.mktemp("host"), limits=limits)
    yield running
    running.wait_until_nothing_is_open()
    running.stop()


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Buffers without end, as good as, but a client must take something within a second."""
    limits = FrontendLimits(
        inference=InferenceLimits(max_stream_buffer_bytes=1 << 30),
        http=HttpLimits(write_timeout_s=1.0),
        grpc=GrpcLimits(write_timeout_s=1.0),
    )
    running = Running(tmp_path_factory.mktemp("host"), limits=limits)
    yield running
    running.wait_until_nothing_is_open()
    running.stop()


def ask(address: str, path: str, body: dict[str, Any], window_bytes: int = 4096) -> socket.socket:
    """A connection that has sent a request; the kernel takes little of what comes before it is read."""
    host, port = address.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def read_events(connection: socket.socket) -> list[Any]:
    """The events of an event stream until its end."""
    received = bytearray()
    while not received.endswith(b"\r\n0\r\n\r\n"):
        piece = connection.recv(1 << 20)
        assert piece, "the connection ended before the stream"
        received += piece
    connection.close()
    text = b"".join(_chunks(bytes(received)))
    return [json.loads(event[6:]) for event in text.split(b"\n\n") if event.startswith(b"data: {")]


def _chunks(answer: bytes) -> Iterator[bytes]:
    at = answer.index(b"\r\n\r\n") + 4
    while at < len(answer):
        begin = answer.index(b"\r\n", at) + 2
        end = begin + int(answer[at:begin], 16)
        yield answer[begin:end]
        at = end + 2


def grpc_request(request_id: str, words: str) -> Any:
    request = pb.ModelInferRequest(model_name="llm", id=request_id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(words.encode())
    return request


def tokens(texts: list[str]) -> list[str]:
    return [text.split(".")[0] for text in texts]


def test_a_stream_that_is_not_read_is_cancelled_and_ends_with_an_error_after_a_prefix(running: Running) -> None:
    connection = ask(running.http, "/v2/models/llm/generate_stream", {"id": "unread", "text_input": FLOOD})
    assert RECORD.cancelled["unread"].wait(20)
    other = httpx.post(f"http://{running.http}/v2/models/llm/generate_stream", json={"text_input": "n=50"}, timeout=20)
    assert other.text.count("data: ") == 50
    *events, last = read_events(connection)
    assert tokens([event["text_output"] for event in events]) == [f" tok{index}" for index in range(len(events))]
    assert last == {
        "error": f"the request was cancelled: its client reads too slowly, more than {BUFFER_BYTES} bytes were waiting "
        "for it"
    }
    assert RECORD.cancels["unread"] == 1


def test_requests_of_one_grpc_stream_share_one_bound(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Backlog] = []
    monkeypatch.setattr(
        running.gate,
        "new_backlog",
        lambda: made.append(Backlog(BUFFER_BYTES)) or made[-1],  # type: ignore[func-returns-value]
    )
    names = [f"many-{index}" for index in range(4)]
    most = 0
    with grpc.insecure_channel(running.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([grpc_request(name, FLOOD) for name in names]), timeout=60)
        while not all(RECORD.cancelled[name].is_set() for name in names):
            most = max(most, *(backlog.waiting_bytes for backlog in made), 0)
            time.sleep(0.001)
        texts: dict[str, list[str]] = {name: [] for name in names}
        errors: dict[str, str] = {}
        for message in call:
            answer = message.infer_response
            assert answer.id not in errors, "a response after the last one"
            if message.error_message:
                errors[answer.id] = message.error_message
            else:
                texts[answer.id].append(answer.raw_output_contents[0][4:].decode())
    assert errors.keys() == set(names)
    assert all("reads too slowly" in error for error in errors.values())
    for name in names:
        assert tokens(texts[name]) == [f" tok{index}" for index in range(len(texts[name]))]
        assert RECORD.cancels[name] == 1
    assert 0 < most < BUFFER_BYTES + len(names) * 10_000


def test_requests_of_one_grpc_stream_are_complete_and_in_turns_for_a_client_that_begins_to_read_late(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Backlog] = []
    monkeypatch.setattr(
        running.gate,
        "new_backlog",
        lambda: made.append(Backlog(1 << 30)) or made[-1],  # type: ignore[func-returns-value]
    )
    names, count = [f"late-{index}" for index in range(3)], 100
    with grpc.insecure_channel(running.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests = [*(grpc_request(name, f"n={count} kib=64") for name in names), grpc_request("refused", "preerr")]
        call = stub.ModelStreamInfer(iter(requests), timeout=60)
        eventually(lambda: sum(backlog.waiting_bytes for backlog in made) > 4 << 20)
        texts: dict[str, list[str]] = {name: [] for name in names}
        order = []
        for message in call:
            answer = message.infer_response
            order.append(answer.id)
            if answer.id == "refused":
                assert message.error_message == "early failure"
            else:
                assert not message.error_message
                texts[answer.id].append(answer.raw_output_contents[0][4:].decode())
    assert call.code() is grpc.StatusCode.OK
    assert [tokens(texts[name]) for name in names] == [[f" tok{index}" for index in range(count)]] * len(names)
    assert "refused" in order[: -count // 2], "what waits is written in turns, not request after request"
    eventually(lambda: running.gate.open_inferences == 0)


def test_an_openai_stream_that_is_not_read_ends_with_an_error_event() -> None:
    host = FakeLlmServer()
    gate = InferenceGate(host, InferenceLimits(max_stream_buffer_bytes=BUFFER_BYTES))  # type: ignore[arg-type]
    with serve_openai(host, gate=gate) as url:
        body = {"model": "fake", "prompt": ["flood", "flood too"], "stream": True}
        connection = ask(url.removeprefix("http://"), "/v1/completions", body)
        eventually(lambda: len(host.handles) == 2 and all(handle.cancelled.is_set() for handle in host.handles))
        *_, last = read_events(connection)
        assert last["error"]["code"] == "cancelled" and "reads too slowly" in last["error"]["message"]
        eventually(lambda: gate.open_inferences == 0)


def wait_until_cut(connection: socket.socket) -> None:
    """Waits, reading nothing, until the server has reset the connection."""
    poll = select.poll()
    poll.register(connection, 0)
    ((_, event),) = poll.poll(20_000)
    assert event & select.POLLERR
    connection.close()


def test_a_client_that_takes_nothing_for_too_long_is_cut_off(impatient: Running) -> None:
    connection = ask(impatient.http, "/v2/models/llm/generate_stream", {"id": "stalled", "text_input": STEADY})
    wait_until_cut(connection)
    assert RECORD.cancelled["stalled"].wait(10)


def test_an_answer_that_is_not_taken_does_not_hold_its_connection(impatient: Running) -> None:
    connection = ask(impatient.http, "/v2/models/llm/generate", {"id": "whole", "text_input": "n=1 kib=16384"})
    eventually(lambda: RECORD.began["whole"].is_set() and impatient.gate.open_inferences == 0)
    wait_until_cut(connection)
    assert not RECORD.cancelled["whole"].is_set()


def test_a_grpc_stream_whose_client_takes_nothing_ends_with_cancelled(impatient: Running) -> None:
    with grpc.insecure_channel(impatient.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([grpc_request("grpc-stalled", STEADY)]), timeout=60)
        assert RECORD.cancelled["grpc-stalled"].wait(20)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert caught.value.details() == "the stream was cancelled: its client read nothing for 1 s"


def test_a_slow_but_steady_reader_is_served_to_the_end(impatient: Running) -> None:
    body = {"id": "steady", "text_input": "n=4000 kib=8"}
    with ask(impatient.http, "/v2/models/llm/generate_stream", body, window_bytes=1 << 20) as connection:
        slow_until_s, received = time.monotonic() + 1.5, bytearray()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += connection.recv(256 << 10)
            time.sleep(0.02 if time.monotonic() < slow_until_s else 0)
    assert received.count(b"data: ") == 4000
    assert not RECORD.cancelled["steady"].is_set()


class ByHand:
    """A mailbox that delivers at once."""

    def put(self, inference: Inference, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        inference.deliver(response, flags, response_bytes(response))


class NotingHandle:
    def __init__(self) -> None:
        self.cancels: list[int] = []

    def cancel(self) -> None:
        self.cancels.append(1)


def test_one_response_may_be_of_any_size_and_the_backlog_is_given_back() -> None:
    backlog = Backlog(1000)
    streams = [Inference(ByHand(), backlog) for _ in range(2)]  # type: ignore[arg-type]
    big = InferenceResponse("m", 1, "", (Tensor.text("t", "x" * 5000),))
    for stream in streams:
        stream(big, ResponseFlag.NONE)
    assert backlog.waiting_bytes > 10_000 and [stream.pop()[0] for stream in streams] == [big, big]
    assert backlog.waiting_bytes == 0
    handle = NotingHandle()
    streams[0].accepted(handle)
    for _ in range(4):
        streams[0](big, ResponseFlag.NONE)
    first, last = streams[0].pop(), streams[0].pop()
    assert first[0] is big and last[0] is not None and last[0].error is not None
    assert last[1] is ResponseFlag.FINAL and handle.cancels == [1] and backlog.waiting_bytes == 0
    streams[1](big, ResponseFlag.NONE)
    streams[1].close()
    streams[1](big, ResponseFlag.FINAL)
    assert backlog.waiting_bytes == 0
