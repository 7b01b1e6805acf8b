"""Starting and stopping the endpoints: ports, draining, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import httpx
import pytest
from prometheus_client import CollectorRegistry
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.http_app import create_http_app
from llmbackend.server.frontend_server import FrontendServer
from llmbackend.server.ports import Endpoint
from tests.helpers.kserve_runner import FREE_PORT, NO_PORT, Running
from tests.helpers.kserve_scripted import RECORD
from tests.helpers.ports import free_port
from tests.helpers.waiting import eventually


def frontend_server(host: InferenceServer, **endpoints: Any) -> FrontendServer:
    context = FrontendContext.of(host)
    return FrontendServer(context, create_http_app(context), **endpoints)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    return Running(tmp_path)  # type: ignore[return-value]


def stream_http(running: Running, words: str, request_id: str, got: list[Any]) -> threading.Thread:
    def read() -> None:
        body = {"id": request_id, "text_input": words}
        try:
            with httpx.stream(
                "POST", f"http://{running.http}/v2/models/llm/generate_stream", json=body, timeout=30
            ) as answer:
                got.extend(json.loads(line[6:]) for line in answer.iter_lines() if line)
        except httpx.TransportError as error:
            got.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert RECORD.began[request_id].wait(10)
    return thread


def stream_grpc(running: Running, words: str, request_id: str, got: list[Any]) -> threading.Thread:
    def read() -> None:
        request = pb.ModelInferRequest(model_name="llm", id=request_id)
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            words.encode()
        )
        with grpc.insecure_channel(running.grpc) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                got.extend(stub.ModelStreamInfer(iter([request]), timeout=30))
            except grpc.RpcError as error:
                got.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert RECORD.began[request_id].wait(10)
    return thread


def test_stop_lets_running_streams_finish_and_refuses_new_ones(running: Running) -> None:
    http_got: list[Any] = []
    grpc_got: list[Any] = []
    readers = [
        stream_http(running, "n=5 sleep=100", "drain-http", http_got),
        stream_grpc(running, "n=5 sleep=100", "drain-grpc", grpc_got),
    ]
    running.stop(grace_s=20)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{running.http}/v2/health/live")
    for reader in readers:
        reader.join(10)
    assert [event["text_output"] for event in http_got] == [f" tok{index}" for index in range(5)]
    assert len(grpc_got) == 5 and all(message.infer_response.id == "drain-grpc" for message in grpc_got)


def test_stop_cuts_and_cancels_what_outlives_its_grace(running: Running) -> None:
    got: list[Any] = []
    readers = [
        stream_http(running, "n=1000 sleep=50", "cut-http", got),
        stream_grpc(running, "n=1000 sleep=50", "cut-grpc", got),
    ]
    running.stop(grace_s=0.2)
    for reader in readers:
        reader.join(10)
    assert RECORD.cancelled["cut-http"].wait(10) and RECORD.cancelled["cut-grpc"].wait(10)


def test_idle_connections_do_not_hold_up_a_stop(running: Running) -> None:
    host, port = running.http.split(":")
    with socket.create_connection((host, int(port))) as silent, httpx.Client() as client:
        assert client.get(f"http://{running.http}/v2/health/live").status_code == 200
        running.stop(grace_s=20)
        assert silent.recv(1) == b""


@pytest.mark.parametrize("taken", ["http", "grpc", "metrics"])
def test_a_port_that_is_taken_leaves_nothing_open(taken: str) -> None:
    async def run(ports: dict[str, Any]) -> None:
        frontend = frontend_server(InferenceServer(ServerOptions()), **ports)
        with pytest.raises((OSError, RuntimeError)):
            await frontend.start()
        for endpoint in (frontend.http_port, frontend.metrics_port):
            if endpoint is not None:
                with socket.create_server(("127.0.0.1", endpoint)):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as holder:
        ports: dict[str, Any] = dict.fromkeys(("http", "grpc", "metrics"), FREE_PORT)
        ports[taken] = Endpoint("127.0.0.1", holder.getsockname()[1])
        asyncio.run(run(ports))


async def test_ports_are_taken_before_they_are_opened() -> None:
    frontend = frontend_server(
        InferenceServer(ServerOptions()),
        http=FREE_PORT,
        grpc=Endpoint("127.0.0.1", free_port()),
        metrics=FREE_PORT,
    )
    frontend.bind()
    address = ("127.0.0.1", frontend.http_port or 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    await frontend.start()
    socket.create_connection(address).close()
    for port in (frontend.http_port, frontend.grpc_port, frontend.metrics_port):
        late = frontend_server(
            InferenceServer(ServerOptions()), http=FREE_PORT, grpc=Endpoint("127.0.0.1", port or 0), metrics=NO_PORT
        )
        with pytest.raises(OSError, match=rf"Address already in use: 127\.0\.0\.1:{port}"):
            late.bind()
    await frontend.stop(1)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").read_text(), reason="the machine has no IPv6 address")
async def test_all_addresses_of_ipv6_include_those_of_ipv4() -> None:
    frontend = frontend_server(InferenceServer(ServerOptions()), http=Endpoint("::", 0), grpc=NO_PORT, metrics=NO_PORT)
    await frontend.start()
    for address in ("::1", "127.0.0.1"):
        socket.create_connection((address, frontend.http_port or 0)).close()
    await frontend.stop(1)


async def test_endpoints_can_be_left_out() -> None:
    frontend = frontend_server(InferenceServer(ServerOptions()), http=FREE_PORT, grpc=NO_PORT, metrics=NO_PORT)
    await frontend.start()
    assert frontend.http_port and frontend.grpc_port is None and frontend.metrics_port is None
    await frontend.stop(1)


def test_requests_that_are_no_http_do_not_stop_the_server(running: Running) -> None:
    host, port = running.http.split(":")
    for junk in (
        b"\x00\xff\x00\xff\r\n\r\n",
        b"POST /v2 HTTP/1.1\r\nContent-Length: abc\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(junk)
            connection.settimeout(10)
            assert connection.recv(100).startswith(b"HTTP/1.1 400")
    assert httpx.get(f"http://{running.http}/v2/health/ready").status_code == 200
    running.stop()


def test_nothing_is_left_of_streams_that_ended_in_any_way(running: Running) -> None:
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    before = running.call(tasks())
    host, port = running.http.split(":")
    for index in range(8):
        got: list[Any] = []
        stream_http(running, "n=3", f"end-http-{index}", got).join(10)
        stream_grpc(running, "n=3", f"end-grpc-{index}", got).join(10)
        body = json.dumps({"id": f"end-gone-{index}", "text_input": "n=1000 sleep=20"})
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v2/models/llm/generate_stream HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body.encode())
            assert RECORD.began[f"end-gone-{index}"].wait(10)
        assert RECORD.cancelled[f"end-gone-{index}"].wait(10)
    eventually(lambda: running.call(tasks()) <= before)
    assert running.call(tasks()) == before
    running.stop()


def test_a_bug_of_ours_is_a_500_without_detail_on_http_and_grpc(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        no_host = Mock(
            InferenceServer,
            metrics_registry=CollectorRegistry(),
            server_metadata=Mock(side_effect=AttributeError("it has no attribute")),
        )
        frontend = frontend_server(no_host, http=FREE_PORT, grpc=FREE_PORT, metrics=NO_PORT)
        await frontend.start()
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://127.0.0.1:{frontend.http_port}/v2")
        assert (answer.status_code, answer.json()) == (500, {"error": "internal error, see the server's log"})
        async with grpc.aio.insecure_channel(f"127.0.0.1:{frontend.grpc_port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ServerMetadata(pb.ServerMetadataRequest())
        assert caught.value.details() == "internal error, see the server's log"
        await frontend.stop(1)

    asyncio.run(run())
    assert caplog.text.count("AttributeError") == 2 and "in server_metadata" in caplog.text
    assert "has no attribute" not in caplog.text  # the text of an error may quote a prompt
