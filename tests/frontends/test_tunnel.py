"""Websockets that are handed, as bytes, to another process, over a real endpoint and a real unix socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from llmbackend.frontends.http.endpoint import HttpEndpoint
from llmbackend.frontends.http.protocol import GuardedProtocol
from llmbackend.frontends.limits import HttpLimits
from tests.helpers.waiting import eventually_async

P = TypeVar("P", bound=asyncio.BaseProtocol)

UPGRADE = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-A: b\r\n\r\n"
LARGE = bytes(range(256)) * (16 << 10)


class Tunnels:
    """To the unix socket `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refusal = ""
        self.num_open = 0

    def takes_websocket(self, target: bytes) -> bool:
        return target.startswith(b"/tunnel")

    def websocket_refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        assert (b"x-a", b"b") in headers
        return self.refusal

    async def connect(self, make_protocol: Callable[[], P]) -> P:
        _, protocol = await asyncio.get_running_loop().create_unix_connection(make_protocol, str(self.path))
        self.num_open += 1
        return protocol

    def left(self) -> None:
        self.num_open -= 1


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with the head that it got, then with what comes."""
    writer.write(await reader.readuntil(b"\r\n\r\n"))
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def serving(path: Path, limits: HttpLimits | None = None) -> AsyncIterator[tuple[Tunnels, HttpEndpoint]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    tunnels = Tunnels(path)
    far = await asyncio.start_unix_server(echo, str(path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = HttpEndpoint(app, listener, lambda: None, tunnels)
        await endpoint.start(limits or HttpLimits(), GuardedProtocol, 1 << 20)
        yield tunnels, endpoint
        await endpoint.stop(0.2)
    await eventually_async(lambda: not tunnels.num_open, 10)
    far.close()
    await far.wait_closed()


async def opened(endpoint: HttpEndpoint, path: bytes = b"/tunnel") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    writer.write(UPGRADE % path)
    return reader, writer


async def test_head_and_bytes_pass_in_both_directions(tmp_path: Path) -> None:
    async with serving(tmp_path / "far.sock") as (tunnels, endpoint):
        reader, writer = await opened(endpoint, b"/tunnel?a=b")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /tunnel?a=b HTTP/1.1\r\n") and b"x-a: b\r\n" in head
        writer.write(LARGE)  # more than the buffers on the way hold: each side waits for the other
        assert await reader.readexactly(len(LARGE)) == LARGE
        writer.close()
        await eventually_async(lambda: not tunnels.num_open, 10)


async def test_what_is_no_tunnel_is_answered_by_the_application(tmp_path: Path) -> None:
    async with serving(tmp_path / "far.sock") as (tunnels, endpoint):
        reader, writer = await opened(endpoint, b"/other")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 204")
        writer.close()
        tunnels.refusal = "not from there"
        reader, writer = await opened(endpoint)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 403") and b"not from there" in answer and not tunnels.num_open
        writer.close()


async def test_a_far_side_that_is_not_there_is_a_503(tmp_path: Path) -> None:
    async with serving(tmp_path / "far.sock") as (tunnels, endpoint):
        tunnels.path = tmp_path / "nobody.sock"
        reader, writer = await opened(endpoint)
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
        writer.close()


async def test_an_endpoint_that_stops_closes_its_tunnels(tmp_path: Path) -> None:
    async with serving(tmp_path / "far.sock") as (_, endpoint):
        reader, writer = await opened(endpoint)
        await reader.readuntil(b"\r\n\r\n")
    assert await reader.read() == b""
    writer.close()


async def test_more_websockets_than_an_address_may_have_are_refused_at_the_handshake(tmp_path: Path) -> None:
    async with serving(tmp_path / "far.sock", HttpLimits(max_websockets_per_peer=2)) as (tunnels, endpoint):
        served = [await opened(endpoint) for _ in range(2)]
        for reader, _ in served:
            await reader.readuntil(b"\r\n\r\n")
        reader, writer = await opened(endpoint)
        assert (await reader.read()).startswith(b"HTTP/1.1 429") and tunnels.num_open == 2
        for _, one in (*served, (reader, writer)):
            one.close()
