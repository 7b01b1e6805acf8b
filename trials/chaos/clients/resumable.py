"""Streams whose connections break repeatedly: generate_stream and agents' chats, resumed with `Last-Event-ID`.

Invariant: see the package. Each event arrives once, whatever happens to the connections: ids that are not consecutive
end the stream with an error. If the connection is lost before the first event, the stream is started again.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import httpx

from ..outcome import Piece, StreamFailed
from ..specs import StreamSpec
from .agent_api import ChatIdentity
from .generate import outputs_of
from .http_transport import http_transport, lines_of
from .patience import NO_PATIENCE, Patience
from .tensors import input_values, piece_of

_LONGEST = 40


class ResumableClient:
    """address: asked before each request, where a client may come back to another server. patience: of a client whose
    server is gone. longest: events that one connection gives before its client leaves it."""

    def __init__(
        self,
        address: Callable[[], str],
        receive_buffer_bytes: int = 0,
        patience: Patience = NO_PATIENCE,
        longest: int = _LONGEST,
    ) -> None:
        self._address, self._patience, self._longest = address, patience, longest
        self._http = httpx.AsyncClient(timeout=None, transport=http_transport(httpx, receive_buffer_bytes))

    async def close(self) -> None:
        await self._http.aclose()

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        is_chat = spec.protocol == "resumed_agent"
        identity, tokens = ChatIdentity(), 0
        async with aclosing(self._datas(spec)) as datas:  # type: ignore[type-var]
            async for data in datas:
                if is_chat:
                    yield identity.piece(json.loads(data))
                    continue
                piece = piece_of(outputs_of(json.loads(data)), tokens)
                assert piece.usage is not None
                tokens = piece.usage[1]
                yield piece

    async def _datas(self, spec: StreamSpec) -> AsyncIterator[str]:
        path, body = _request(spec)
        rng, reading = random.Random(spec.index), _Reading()
        waiting = self._patience.begin(spec)
        while not reading.is_over:
            try:
                async for data in self._one_connection(path, body, reading, rng.randint(1, self._longest)):
                    waiting.served()
                    yield data
            except httpx.HTTPError as error:
                await waiting.again(StreamFailed(f"{type(error).__name__}: {error}", "connection"))
            except StreamFailed as error:
                await waiting.again(error)

    async def _one_connection(
        self, path: str, body: dict[str, Any], reading: _Reading, most: int
    ) -> AsyncIterator[str]:
        url = f"http://{self._address()}{path}"
        async with self._http.stream("POST", url, json=body, headers=reading.headers()) as answer:
            if answer.status_code != 200:
                raise StreamFailed((await answer.aread()).decode(), str(answer.status_code))
            reading.on(answer.headers["x-stream-id"])
            async with aclosing(_events(answer)) as events:  # type: ignore[type-var]
                async for name, data in events:
                    reading.event(name)
                    if data != "[DONE]":
                        yield data
                    most -= 1
                    if not most:
                        return
        reading.is_over = True


class _Reading:
    """One stream as far as it was read. Owner: its reader."""

    def __init__(self) -> None:
        self.is_over = False
        self._stream = ""
        self._next_number = 0

    def headers(self) -> dict[str, str]:
        if not self._next_number:
            return {"x-resumable-stream": "true"}
        return {"last-event-id": f"{self._stream}:{self._next_number - 1}"}

    def on(self, stream: str) -> None:
        if self._next_number and stream != self._stream:
            raise StreamFailed(f"the stream is {stream!r}, and was {self._stream!r}", "identity")
        self._stream = stream

    def event(self, name: str) -> None:
        if name != f"{self._stream}:{self._next_number}":
            raise StreamFailed(f"event {name} came in place of {self._next_number}", "identity")
        self._next_number += 1


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """(id, data)"""
    name = ""
    async for line in lines_of(answer):
        if line.startswith("id: "):
            name = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield name, line.removeprefix("data: ")


def _request(spec: StreamSpec) -> tuple[str, dict[str, Any]]:
    if spec.protocol == "resumed_agent":
        return "/v1/chat/completions", spec.sampling | {"stream": True, "stream_options": {"include_usage": True}}
    return f"/v2/models/{spec.model}/generate_stream", input_values(spec)
