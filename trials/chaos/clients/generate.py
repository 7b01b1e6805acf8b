"""generate and generate_stream over HTTP, using httpx.

Invariant: see the package. Source: Triton's generate extension; a tensor of one element arrives as a scalar.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from ..outcome import Piece, StreamFailed
from ..specs import StreamSpec
from .http_transport import http_transport, key_header, lines_of
from .tensors import input_values, piece_of


class GenerateClient:
    def __init__(self, address: str, receive_buffer_bytes: int = 0) -> None:
        transport = http_transport(httpx, receive_buffer_bytes)
        self._http = httpx.AsyncClient(base_url=f"http://{address}", timeout=None, transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        kind = "generate_stream" if spec.streams else "generate"
        path = f"/v2/models/{spec.model}/{kind}"
        tokens = 0
        try:
            async with self._http.stream("POST", path, json=input_values(spec), headers=key_header(spec)) as answer:
                if answer.status_code != 200:
                    raise StreamFailed((await answer.aread()).decode(), str(answer.status_code))
                async for line in lines_of(answer):
                    if not line:
                        continue
                    piece = piece_of(outputs_of(json.loads(line.removeprefix("data: "))), tokens)
                    assert piece.usage is not None
                    tokens = piece.usage[1]
                    yield piece
        except httpx.HTTPError as error:
            raise StreamFailed(f"{type(error).__name__}: {error}", "connection") from error


def outputs_of(event: dict[str, Any]) -> dict[str, Any]:
    if "error" in event:
        raise StreamFailed(event["error"])
    ids = event.get("output_ids", [])
    return event | {"output_ids": ids if isinstance(ids, list) else [ids]}
