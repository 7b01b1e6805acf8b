"""Anthropic's Messages as raw bytes: each content block under its own name.

Invariant: see the package. A stream without `message_stop`, or whose blocks are not numbered consecutively, ends with
an error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from ..outcome import Piece, StreamFailed
from ..specs import StreamSpec
from .events import Event, Identity, events
from .http_transport import http_transport, key_header

_PATH = "/v1/messages"
_HEADERS = {"anthropic-version": "2023-06-01"}
_CACHED = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
"""What of the prompt was cached depends on what ran before: their sum does not."""


class MessagesClient:
    def __init__(self, address: str, receive_buffer_bytes: int = 0) -> None:
        transport = http_transport(httpx, receive_buffer_bytes)
        self._http = httpx.AsyncClient(
            base_url=f"http://{address}", timeout=None, transport=transport, headers=_HEADERS
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        body = spec.sampling | ({"stream": True} if spec.streams else {})
        reading = _Reading()
        try:
            async with self._http.stream("POST", _PATH, json=body, headers=key_header(spec)) as answer:
                if spec.streams:
                    async for event in events(answer, lambda event: event["type"] == "message_stop"):
                        yield Piece(parts=tuple(reading.parts(event)))
                elif answer.status_code == 200:
                    yield Piece(parts=tuple(_of_message(json.loads(await answer.aread()))))
                else:
                    raise StreamFailed((await answer.aread()).decode(), str(answer.status_code))
        except httpx.HTTPError as error:
            raise StreamFailed(f"{type(error).__name__}: {error}", "connection") from error


class _Reading:
    """One message as far as it was read. Owner: its reader."""

    def __init__(self) -> None:
        self._identity = Identity()
        self._blocks = 0
        self._open: int | None = None
        self._usage: dict[str, Any] = {}

    def parts(self, event: Event) -> Iterator[tuple[str, str]]:
        match event["type"]:
            case "error":
                raise StreamFailed(json.dumps(event["error"]))
            case "message_start":
                self._identity.keep("id", event["message"]["id"])
                self._usage = event["message"]["usage"]
            case "content_block_start":
                self._begin(event["index"])
                yield from _beginning(event["index"], event["content_block"])
            case "content_block_delta":
                if event["index"] != self._open:
                    raise StreamFailed(f"a delta of block {event['index']} while {self._open} is open", "identity")
                yield from _delta(event["index"], event["delta"])
            case "content_block_stop":
                self._open = None
            case "message_delta":
                yield from _ending(event["delta"], self._usage | event["usage"])

    def _begin(self, index: int) -> None:
        if index != self._blocks or self._open is not None:
            raise StreamFailed(f"block {index} begins after {self._blocks}, {self._open} is open", "identity")
        self._open, self._blocks = index, self._blocks + 1


def _beginning(place: int, block: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield f"{place} type", block["type"]
    yield f"{place} name", block.get("name", "")
    for name in ("text", "thinking", "signature"):
        if block.get(name):
            yield f"{place} {name}", block[name]


def _delta(place: int, delta: dict[str, Any]) -> Iterator[tuple[str, str]]:
    name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}.get(delta["type"])
    if name is not None:
        yield f"{place} {name}", delta[name]
    else:
        yield f"{place} input", delta["partial_json"]


def _of_message(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for place, block in enumerate(document["content"]):
        yield from _beginning(place, block)
        if "input" in block:
            yield f"{place} input", json.dumps(block["input"])
    yield from _ending(document, document["usage"])


def _ending(ends: dict[str, Any], usage: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "finish_reason", f"{ends['stop_reason']} {ends['stop_sequence'] or ''}"
    counts = {"input": sum(usage.get(name) or 0 for name in _CACHED), "output": usage["output_tokens"]}
    yield "usage", json.dumps(counts)
