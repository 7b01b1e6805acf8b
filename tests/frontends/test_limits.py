"""What hostile and too many clients get: a refusal in their protocol, and nothing of the others' time."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.frontends.limits import FrontendLimits, GrpcLimits, HttpLimits, InferenceLimits
from tests.helpers.kserve_runner import Running
from tests.helpers.kserve_scripted import RECORD

pytestmark = pytest.mark.slow  # limits of time run out

LONG = "n=1000 sleep=20"
MAX_HEADER_BYTES = 8192


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = FrontendLimits(
        inference=InferenceLimits(max_concurrent_requests=2),
        http=HttpLimits(
            max_connections=6,
            max_url_bytes=1024,
            max_header_bytes=MAX_HEADER_BYTES,
            max_headers=20,
            header_timeout_s=0.4,
            body_timeout_s=0.4,
            linger_s=0.8,
        ),
        grpc=GrpcLimits(max_input_size_bytes=1 << 20, max_metadata_bytes=4096),
    )
    with Running(tmp_path_factory.mktemp("host"), max_input_size_bytes=1 << 20, limits=limits) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(tight: Running) -> Iterator[None]:
    yield
    tight.wait_until_nothing_is_open()


def connect(running: Running) -> socket.socket:
    host, port = running.http.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def answer_to(running: Running, *pieces: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with connect(running) as connection:
        for piece in pieces:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(piece)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def grpc_request(request_id: str, words: str) -> Any:
    request = pb.ModelInferRequest(model_name="llm", id=request_id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(words.encode())
    return request


@contextlib.contextmanager
def two_streams(running: Running, name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for index in range(2):
            connection = stack.enter_context(connect(running))
            body = json.dumps({"id": f"{name}-{index}", "text_input": LONG}).encode()
            head = (
                b"POST /v2/models/llm/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
                % len(body)
            )
            connection.sendall(head + body)
            assert RECORD.began[f"{name}-{index}"].wait(10)
        yield


AT_LIMIT = "the server is at its limit of 2 concurrent requests"


def test_more_requests_than_the_limit_get_429_at_once(tight: Running) -> None:
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    with two_streams(tight, "full"), httpx.Client(base_url=f"http://{tight.http}") as client:
        for path, body in (
            ("/v2/models/llm/generate", {"text_input": "n=1"}),
            ("/v2/models/llm/generate_stream", {"text_input": "n=1"}),
            ("/v2/models/identity/infer", {"inputs": [tensor]}),
        ):
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json() == {"error": AT_LIMIT}
        refused = client.post("/v1/completions", json={"model": "llm", "prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"] == {
            "message": AT_LIMIT,
            "type": "requests",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert client.get("/v2/health/ready").status_code == 200
        with grpc.insecure_channel(tight.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = pb.ModelInferRequest(model_name="identity")
            request.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([1, 2, 3, 4])
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(request)
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, AT_LIMIT)
            (message,) = stub.ModelStreamInfer(iter([grpc_request("refused", "n=1")]))
            assert (message.error_message, message.infer_response.id) == (AT_LIMIT, "refused")
    tight.wait_until_nothing_is_open()
    assert httpx.post(f"http://{tight.http}/v2/models/llm/generate", json={"text_input": "n=1"}).status_code == 200


def test_more_connections_than_the_limit_get_429_and_are_closed(tight: Running) -> None:
    get = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(connect(tight))
            connection.sendall(get % b"/v2/health/live")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        refused = answer_to(tight, get % b"/v2/health/live")
        assert refused.startswith(b"HTTP/1.1 429") and b"retry-after: 1\r\n" in refused
        assert b'{"error":"the server is at its limit of 6 connections"}' in refused
        openai = answer_to(tight, get % b"/v1/models")
        assert json.loads(openai.partition(b"\r\n\r\n")[2])["error"]["code"] == "rate_limit_exceeded"
    served = answer_to(
        tight, get.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close") % b"/v2/health/live"
    )
    assert served.startswith(b"HTTP/1.1 200")


POST = b"POST /v2/models/llm/generate HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /v2?" + b"a" * 2000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 414),
        (b"GET /v2 HTTP/1.1\r\n" + b"a: b\r\n" * 30 + b"\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\na: " + b"b" * 9000 + b"\r\n\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\na: " + b"b" * 100_000, 431),
        (b"GET /v2 HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, 431),
        (b"GET /" + b"a" * 100_000, 431),
        (b"\r\n" * 100 + b"GET /v2", 408),
        (POST + b"Content-Length: 10\r\n\r\n12345", 408),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n", 408),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 300_000, 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n", 501),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 2_000_000, 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + b"a: b\r\n" * 300_000, 413),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n: \r\n\r\n", 400),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nhost: y\r\n\r\n", 400),
    ],
)
def test_requests_without_end_or_measure(tight: Running, request_bytes: bytes, status: int) -> None:
    assert answer_to(tight, request_bytes).startswith(b"HTTP/1.1 %d " % status)


def test_a_connection_that_says_nothing_is_closed_without_a_word(tight: Running) -> None:
    assert answer_to(tight) == b""


def test_bytes_that_begin_no_request_do_not_keep_a_connection(tight: Running) -> None:
    with connect(tight) as connection:
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        assert read_all(connection) == b""


def test_a_body_that_stalls_after_an_early_answer_is_cut(tight: Running) -> None:
    got = answer_to(tight, POST.replace(b"llm", b"nosuch") + b"Content-Length: 10000\r\n\r\n12345")
    assert got.startswith(b"HTTP/1.1 404") and got.count(b"HTTP/1.1") == 1


def dripped(running: Running, head: bytes) -> bytes:
    """What comes back to a client that sends a byte of its body now and then, until the connection is closed."""
    with connect(running) as connection:
        connection.sendall(head + b"Content-Length: 10000\r\n\r\n")
        connection.settimeout(0.1)
        received = b""
        for _ in range(100):
            try:
                if not (piece := connection.recv(1 << 16)):
                    return received
                received += piece
            except TimeoutError:
                connection.sendall(b" ")
            except ConnectionResetError:
                return received
    raise AssertionError("the connection is still open")


def test_a_body_that_drips_is_cut(tight: Running) -> None:
    got = dripped(tight, POST)
    assert got.startswith(b"HTTP/1.1 408 ") and b"less than 4096 bytes per second" in got


def test_a_body_that_drips_after_an_early_answer_is_cut(tight: Running) -> None:
    got = dripped(tight, POST.replace(b"llm", b"nosuch"))
    assert got.startswith(b"HTTP/1.1 404") and got.count(b"HTTP/1.1") == 1


def test_a_connection_whose_early_answered_body_came_whole_goes_on_and_does_not_stay_for_ever(tight: Running) -> None:
    with connect(tight) as connection:
        connection.sendall(POST.replace(b"llm", b"nosuch") + b"Content-Length: 10\r\n\r\n12345")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        connection.sendall(b"67890")
        time.sleep(0.1)
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.sendall(POST.replace(b"llm", b"nosuch") + b"Content-Length: 10\r\n\r\n12345")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        connection.sendall(b"67890")
        assert read_all(connection) == b""


def test_a_refused_client_that_asked_to_close_reads_its_answer_before_the_connection_ends(tight: Running) -> None:
    with connect(tight) as connection:
        head = b"Connection: close\r\nContent-Length: 2000000\r\n\r\n"
        connection.sendall(POST.replace(b"llm", b"nosuch") + head)
        assert connection.recv(1 << 16, socket.MSG_PEEK).startswith(b"HTTP/1.1 404")
        connection.sendall(b"x" * 2_000_000)  # as http.client does: all of the body before it reads
        got = read_all(connection)
    assert got.startswith(b"HTTP/1.1 404") and got.count(b"HTTP/1.1") == 1


def test_half_a_pipelined_request_does_not_end_the_running_one(tight: Running) -> None:
    body = json.dumps({"text_input": "n=12 sleep=100"}).encode()
    head = b"POST /v2/models/llm/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    got = answer_to(tight, head + body + POST + b"Content-Length: 10\r\n\r\n123")
    first, _, rest = got.partition(b"0\r\n\r\n")
    assert first.count(b"data: ") == 12 and rest.startswith(b"HTTP/1.1 408")


def test_trailers_do_not_reach_a_request_that_runs(tight: Running) -> None:
    body = b'{"text_input": "n=1"}'
    chunked = POST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
    assert answer_to(tight, chunked + b"x-trailer: 1\r\n" * 100 + b"\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/identity/infer",
        "/v2/models/llm/generate",
        "/v2/models/llm/generate_stream",
        "/v2/models/llm/stop",
        "/v2/repository/index",
        "/v2/repository/models/spare/load",
        "/v1/completions",
        "/v1/chat/completions",
    ],
)
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_of_any_depth_is_an_answer(tight: Running, path: str, opening: str) -> None:
    for body in (opening * 100_000, opening * 100_000 + "1" + ("]" if opening == "[" else "}") * 100_000):
        headers = {"content-type": "application/json"}
        refused = httpx.post(f"http://{tight.http}{path}", content=body, headers=headers, timeout=30)
        assert refused.status_code == 400


def test_bodies_that_are_on_their_way_when_the_server_stops_get_503(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    running = Running(tmp_path_factory.mktemp("uploads"))
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    with contextlib.ExitStack() as stack:
        uploads = {}
        for path in (b"/v2/models/llm/generate", b"/v2/models/identity/infer", b"/v1/completions"):
            uploads[path] = stack.enter_context(connect(running))
            uploads[path].sendall(head % path)
        begun = len(uploads)
        running.wait_for_connections(begun)
        running.stop()
        answers = {path: read_all(connection) for path, connection in uploads.items()}
    for path, answer in answers.items():
        assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in answer
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (error["message"] if path.startswith(b"/v1") else error) == "Server is stopping"
    assert "Traceback" not in caplog.text and "ASGI" not in caplog.text


def test_grpc_messages_and_metadata_beyond_the_limits(tight: Running) -> None:
    with grpc.insecure_channel(tight.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for call in (
            lambda: stub.ModelInfer(grpc_request("", "x" * (2 << 20))),
            lambda: stub.ServerLive(pb.ServerLiveRequest(), metadata=[("a", "b" * 10_000)]),
            lambda: list(stub.ModelStreamInfer(iter([grpc_request("", "x" * (2 << 20))]))),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.ServerLive(pb.ServerLiveRequest()).live


def test_health_of_services_that_are_unknown(tight: Running) -> None:
    with grpc.insecure_channel(tight.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        check = health.Check(health_pb2.HealthCheckRequest(service="nosuch"))
        assert check.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service="nosuch"), timeout=20)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


def test_while_exiting_health_and_new_work_are_refused_and_running_streams_end_whole(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    running = Running(tmp_path_factory.mktemp("exiting"))
    got: list[str] = []
    body = {"id": "draining", "text_input": "n=40 sleep=50"}
    reader = threading.Thread(
        target=lambda: got.append(httpx.post(f"http://{running.http}/v2/models/llm/generate_stream", json=body).text)
    )
    reader.start()
    assert RECORD.began["draining"].wait(10)
    with grpc.insecure_channel(running.grpc) as channel, httpx.Client(base_url=f"http://{running.http}") as client:
        stub, health = service_pb2_grpc.GRPCInferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        stopper = threading.Thread(target=running.host.stop, args=(20,))
        stopper.start()
        while not running.host.is_exiting:
            pass
        for path in ("/v2/health/live", "/v2/health/ready"):
            refused = client.get(path)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        for path in ("/v2/models/llm/generate", "/v2/models/llm/generate_stream"):
            refused = client.post(path, json={"text_input": "n=1"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        with pytest.raises(grpc.RpcError) as caught:
            stub.ServerReady(pb.ServerReadyRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        (message,) = stub.ModelStreamInfer(iter([grpc_request("late", "n=1")]))
        assert message.error_message == "Server is stopping"
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
    reader.join(20)
    stopper.join(20)
    assert got[0].count("data: ") == 40 and "error" not in got[0]
    running.stop()
