"""Pipelined requests: all are answered in order, and few are parsed ahead, however many arrive at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmbackend.frontends.http.endpoint import HttpEndpoint
from llmbackend.frontends.http.protocol import GuardedProtocol
from llmbackend.frontends.limits import HttpLimits

PADDED = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"
FEW = 64


@dataclass
class Application:
    """Answers each request with its path and body, once it may."""

    protocols: list[GuardedProtocol] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    may_answer: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    most_waiting: int = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await self.may_answer.acquire()
        self.most_waiting = max(self.most_waiting, len(self.protocols[0].pipeline))
        answer = scope["path"].encode() + b" %d" % len(body)
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Application, asyncio.StreamReader, asyncio.StreamWriter]]:
    application = Application()

    class Recorded(GuardedProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            application.protocols.append(self)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = HttpEndpoint(application, listener, lambda: None)
        await endpoint.start(HttpLimits(), Recorded, 1 << 20)
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
        try:
            yield application, reader, writer
        finally:
            writer.close()
            await endpoint.stop(2)


async def answers(reader: asyncio.StreamReader, number: int) -> list[bytes]:
    found = []
    for _ in range(number):
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"):
            pass
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(await reader.readexactly(length))
    return found


async def test_few_of_many_requests_are_parsed_ahead_and_all_are_answered() -> None:
    number = 12_000
    async with serving() as (application, reader, writer):
        writer.write(b"".join(PADDED % index for index in range(number)))
        while not application.protocols or not application.protocols[0].pipeline:
            await asyncio.sleep(0.01)
        protocol = application.protocols[0]
        assert application.paths == ["/0"] and len(protocol.pipeline) < FEW
        for _ in range(10):
            application.may_answer.release()
        found = await answers(reader, 10)
        assert len(protocol.pipeline) < FEW
        for _ in range(number):
            application.may_answer.release()
        found += await answers(reader, number - 10)
        assert found == [b"/%d 0" % index for index in range(number)]
        assert application.most_waiting < FEW


@pytest.mark.parametrize("size", [10, 3000, 200_000])
async def test_pipelined_bodies_arrive_whole(size: int) -> None:
    head = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    async with serving() as (application, reader, writer):
        writer.write(b"".join(head % (index, size) + b"\r\n" * (size // 2) for index in range(40)))
        for _ in range(40):
            application.may_answer.release()
        assert await answers(reader, 40) == [b"/%d %d" % (index, size) for index in range(40)]
        assert application.most_waiting < FEW


async def test_too_many_requests_behind_a_long_body_end_the_connection() -> None:
    """The parser takes a long body in long parts, and does not stop at its end."""
    body = b"x" * 300_000
    async with serving() as (application, reader, writer):
        writer.write(b"POST /0 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (len(body) + 1) + body)
        while not application.protocols or application.protocols[0]._body_bytes < len(body):
            await asyncio.sleep(0.01)
        writer.write(b"x" + b"GET / HTTP/1.1\r\n\r\n" * 3000)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        assert application.paths == ["/0"]
        application.may_answer.release()


async def test_requests_before_the_end_of_sending_are_answered() -> None:
    number = 1000
    async with serving() as (application, reader, writer):
        writer.write(b"".join(PADDED % index for index in range(number)))
        writer.write_eof()
        for _ in range(number):
            application.may_answer.release()
        assert await answers(reader, number) == [b"/%d 0" % index for index in range(number)]
