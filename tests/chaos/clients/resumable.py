"""Streams whose connections break again and again: generate_stream and chats of agents, read on by `Last-Event-ID`.

Invariant: see the package. Each event comes once, whatever the connections do: ids that are not one after the other end
the stream with an error.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import httpx

from ..outcome import Piece, StreamFailed
from ..specs import StreamSpec
from .agent_api import ChatIdentity
from .generate import outputs_of
from .http_transport import http_transport
from .tensors import input_values, piece_of

_LONGEST = 40
"""Events that one connection gives before it breaks."""


class ResumableClient:
    def __init__(self, address: str, receive_buffer_bytes: int = 0) -> None:
        transport = http_transport(httpx, receive_buffer_bytes)
        self._http = httpx.AsyncClient(base_url=f"http://{address}", timeout=None, transport=transport)

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
        rng, headers, next_number, stream = random.Random(spec.index), {"x-resumable-stream": "true"}, 0, ""
        try:
            while True:
                left = rng.randint(1, _LONGEST)
                async with self._http.stream("POST", path, json=body, headers=headers) as answer:
                    if answer.status_code != 200:
                        raise StreamFailed((await answer.aread()).decode(), str(answer.status_code))
                    stream = answer.headers["x-stream-id"]
                    async with aclosing(_events(answer)) as events:  # type: ignore[type-var]
                        async for name, data in events:
                            if name != f"{stream}:{next_number}":
                                raise StreamFailed(f"event {name} came in place of {next_number}", "identity")
                            next_number += 1
                            if data != "[DONE]":
                                yield data
                            left -= 1
                            if not left:
                                break
                        else:
                            return
                headers = {"last-event-id": f"{stream}:{next_number - 1}"}
        except httpx.HTTPError as error:
            raise StreamFailed(f"{type(error).__name__}: {error}", "connection") from error


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """(id, data)"""
    name = ""
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            name = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield name, line.removeprefix("data: ")


def _request(spec: StreamSpec) -> tuple[str, dict[str, Any]]:
    if spec.protocol == "resumed_agent":
        return "/v1/chat/completions", spec.sampling | {"stream": True, "stream_options": {"include_usage": True}}
    return f"/v2/models/{spec.model}/generate_stream", input_values(spec)
