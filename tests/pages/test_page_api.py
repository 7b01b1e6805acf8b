"""The pages' client of the API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from llmbackend.pages.api import Api, ServerEvent, connected

TEXT = "one\u2028two\u2029three\u0085four"
"""Characters that end a line for str.splitlines, and no line of server-sent events."""


def test_an_event_is_whole_whatever_the_models_text_has_in_it(tmp_path: Path) -> None:
    data = json.dumps({"text": TEXT}, ensure_ascii=False)
    body = f"id: s:0\ndata: {data}\n\nevent: end\ndata: 1\ndata: 2\n\n".encode()
    assert asyncio.run(_events_of(body, tmp_path / "api")) == [
        ServerEvent("message", data, "s:0"),
        ServerEvent("end", "1\n2", "s:0"),
    ]


async def _events_of(body: bytes, socket: Path) -> list[ServerEvent]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        for place in range(len(body)):  # a character may come in several parts
            writer.write(body[place : place + 1])
            await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(answer, socket), connected(socket):
        return [event async for event in Api(lambda: "").stream("GET", "/")]
