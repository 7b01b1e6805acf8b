"""What a frontend process passes on to its host: the end of a host within a response is the end of the connection."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from llmbackend.frontends.http.endpoint import HttpEndpoint
from llmbackend.frontends.http.protocol import GuardedProtocol
from llmbackend.frontends.limits import HttpLimits
from llmbackend.frontends.passing_on.host_http import HOST_IS_GONE, HostApplication

Host = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
GET = b"GET /v2/models/stats HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def answer_of(path: Path, host: Host | None) -> bytes:
    """What a client reads until its connection ends."""
    serving = await asyncio.start_unix_server(host, path) if host is not None else None
    with socket.create_server(("127.0.0.1", 0)) as bound:
        endpoint = HttpEndpoint(HostApplication(path), bound, lambda: None)
        await endpoint.start(HttpLimits(), GuardedProtocol, 1 << 20)
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(GET)
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
        f"{HOST_IS_GONE}: the process that answers ended"
    ]


def test_a_host_that_is_not_there_is_a_503(tmp_path: Path) -> None:
    data = asyncio.run(answer_of(tmp_path / "host", None))
    assert data.startswith(b"HTTP/1.1 503") and HOST_IS_GONE.encode() in data
