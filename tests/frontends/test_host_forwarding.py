"""What a frontend process forwards to its host: a host that ends within a response ends the connection; in place of one
that is away, the client gets a 503 or the process's own answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from tritonclient.grpc import service_pb2 as pb

from llmbackend.frontends.host_forwarding import HOST_IS_GONE, HostApplication, is_kept_stream
from llmbackend.frontends.http.endpoint import HttpEndpoint
from llmbackend.frontends.http.protocol import GuardedProtocol
from llmbackend.frontends.limits import HttpLimits

Host = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
REST = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
GET = b"GET /v2/models/stats"


async def answer_of(path: Path, host: Host | None, request: bytes = GET) -> bytes:
    """What a client reads until its connection ends. The frontend's own application says "here"."""
    serving = await asyncio.start_unix_server(host, path) if host is not None else None
    with socket.create_server(("127.0.0.1", 0)) as bound:
        served = HostApplication(path).route(PlainTextResponse("here"))
        endpoint = HttpEndpoint(served, bound, lambda: None)
        await endpoint.start(HttpLimits(), GuardedProtocol, 1 << 20)
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(request + REST)
        data = await asyncio.wait_for(reader.read(-1), 60)
        writer.close()
        await endpoint.stop(30)
    if serving is not None:
        serving.close()
        await serving.wait_closed()
    return data


async def ends_within(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nevent\r\n")
    await writer.drain()
    writer.close()


def test_a_host_that_ends_within_a_response_ends_the_connection_without_an_error_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = asyncio.run(answer_of(tmp_path / "host", ends_within))
    assert data.startswith(b"HTTP/1.1 200") and data.endswith(b"5\r\nevent\r\n"), "without the mark of a whole body"
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"{HOST_IS_GONE}: the process that answers has exited"
    ]


@pytest.mark.parametrize(("parameter", "is_kept"), [("resumable", True), ("resume_from", True), ("resumes", False)])
def test_the_first_message_of_a_stream_says_whether_the_host_retains_it(parameter: str, is_kept: bool) -> None:
    request = pb.ModelInferRequest(model_name="resumable")
    request.parameters["text"].string_param = "resume_from"
    request.inputs.add(name="resume").contents.bytes_contents.extend([b"resumable"] * 10)
    assert not is_kept_stream(request.SerializeToString())
    request.parameters[parameter].string_param = "x"
    assert is_kept_stream(request.SerializeToString()) == is_kept


def test_a_host_that_is_not_there_is_a_503(tmp_path: Path) -> None:
    data = asyncio.run(answer_of(tmp_path / "host", None))
    assert data.startswith(b"HTTP/1.1 503") and HOST_IS_GONE.encode() in data


async def ends_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("host", [None, ends_at_once])
@pytest.mark.parametrize(
    ("request_line", "is_answered"),
    [
        (b"GET /v2", True),
        (b"GET /v2/health/live", True),
        (b"GET /v2/models/m", True),
        (b"GET /v2/models/m/versions/2/ready", True),
        (b"GET /v1/models/a/b", True),
        (b"GET /v2/models/stats", False),
        (b"GET /v2/models/m/stats", False),
        (b"GET /v2/models/m/versions/2/config", False),
        (b"POST /v2", False),
        (b"GET /v1/responses/r", False),
    ],
)
def test_what_any_host_could_say_is_answered_in_the_place_of_one_that_is_away(
    tmp_path: Path, host: Host | None, request_line: bytes, is_answered: bool
) -> None:
    data = asyncio.run(answer_of(tmp_path / "host", host, request_line))
    assert data.startswith(b"HTTP/1.1 200") and data.endswith(b"here") if is_answered else b"HTTP/1.1 503" in data
