"""Agents' chats as raw bytes: every field of a choice under its own name.

Invariant: see the package. If an identity (`id`, `created`, ids of calls) changes within a stream, or `[DONE]` is
missing, the stream ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from ..outcome import Piece, StreamFailed
from ..specs import StreamSpec
from .http_transport import http_transport, key_header, lines_of

_PATH = "/v1/chat/completions"


class AgentClient:
    def __init__(self, address: str, receive_buffer_bytes: int = 0) -> None:
        transport = http_transport(httpx, receive_buffer_bytes)
        self._http = httpx.AsyncClient(base_url=f"http://{address}", timeout=None, transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        body = spec.sampling | ({"stream": True, "stream_options": {"include_usage": True}} if spec.streams else {})
        identity = ChatIdentity()
        try:
            async with self._http.stream("POST", _PATH, json=body, headers=key_header(spec)) as answer:
                if answer.status_code != 200:
                    raise StreamFailed((await answer.aread()).decode(), str(answer.status_code))
                if not spec.streams:
                    yield identity.piece(json.loads(await answer.aread()))
                    return
                async for document in events(answer):
                    yield identity.piece(document)
        except httpx.HTTPError as error:
            raise StreamFailed(f"{type(error).__name__}: {error}", "connection") from error


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Raises StreamFailed where the stream ends without `[DONE]`."""
    async for line in lines_of(answer):
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):  # and not a comment, which a stream that waits sends
            yield json.loads(line.removeprefix("data: "))
    raise StreamFailed("the stream ended without [DONE]", "connection")


class ChatIdentity:
    """What must stay the same within one answer. Owner: its stream's reader."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def piece(self, document: dict[str, Any]) -> Piece:
        if "error" in document:
            raise StreamFailed(json.dumps(document["error"]))
        for name in ("id", "created", "model"):
            self._keep(name, document[name])
        parts = list(_document_parts(document))
        for choice in document["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            for place, call in enumerate(message.get("tool_calls") or ()):
                if "id" in call:
                    self._keep(f"id of call {choice['index']}.{call.get('index', place)}", call["id"])
        return Piece(parts=tuple(parts))

    def _keep(self, name: str, value: Any) -> None:
        if not value or self._seen.setdefault(name, value) != value:
            raise StreamFailed(f"{name} is {value!r}, and was {self._seen.get(name)!r}", "identity")


def _document_parts(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for choice in document["choices"]:
        for name, text in _choice_parts(choice):
            yield f"{choice['index']} {name}", text
    if document.get("prompt_logprobs"):
        yield "prompt_logprobs", json.dumps(document["prompt_logprobs"])
    if usage := document.get("usage"):
        usage.pop("prompt_tokens_details", None)  # what of the prompt was cached depends on what ran before
        yield "usage", json.dumps(usage, sort_keys=True)


def _choice_parts(choice: dict[str, Any]) -> Iterator[tuple[str, str]]:
    message = choice.get("delta") or choice.get("message") or {}
    for name in ("content", "reasoning", "reasoning_content", "refusal"):
        if message.get(name):
            yield name, message[name]
    for place, call in enumerate(message.get("tool_calls") or ()):
        number = call.get("index", place)
        for name in ("name", "arguments"):
            if call["function"].get(name):
                yield f"call {number} {name}", call["function"][name]
    if choice.get("logprobs"):
        yield "logprobs", "".join(f"{json.dumps(entry)}\n" for entry in choice["logprobs"]["content"])
    if choice.get("finish_reason"):
        yield "finish_reason", choice["finish_reason"]
