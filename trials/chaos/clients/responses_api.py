"""Responses as raw bytes: whole, streamed, or in the background, with readers that resume by cursor.

Invariant: see the package. If something changes within a stream that must not (ids, times, sequence numbers), or the
last event does not match the deltas, the stream ends with an error.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import httpx

from ..outcome import Piece, StreamFailed
from ..specs import StreamSpec
from .events import Event, Identity, events
from .http_transport import http_transport
from .patience import NO_PATIENCE, Patience, Waiting

_PATH = "/v1/responses"
_LAST = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
Result = TypeVar("Result")
_TEXTS = {"message": "text", "reasoning": "reasoning", "function_call": "arguments", "custom_tool_call": "input"}
"""The name of an item's text among the parts."""


class ResponsesClient:
    """address: asked before each request, since a server that was started again has another. patience: of a background
    response's reader whose server is gone."""

    def __init__(
        self, address: Callable[[], str], receive_buffer_bytes: int = 0, patience: Patience = NO_PATIENCE
    ) -> None:
        self._address, self._patience = address, patience
        self._http = httpx.AsyncClient(timeout=None, transport=http_transport(httpx, receive_buffer_bytes))

    async def close(self) -> None:
        await self._http.aclose()

    async def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        seen = _Reading()
        try:
            if spec.protocol == "background":
                async for piece in self._by_cursor(spec, seen):
                    yield piece
            elif spec.streams:
                async with self._http.stream("POST", self._url(), json=spec.sampling | {"stream": True}) as answer:
                    async for event in events(answer, _is_last):
                        yield seen.piece(event)
            else:
                yield seen.whole(await self._posted(spec.sampling))
        except httpx.HTTPError as error:
            raise StreamFailed(f"{type(error).__name__}: {error}", "connection") from error

    async def _by_cursor(self, spec: StreamSpec, seen: _Reading) -> AsyncIterator[Piece]:
        """Reads a few events at a time, each time on a new connection."""
        waiting = self._patience.begin(spec)
        created = await self._patiently(
            waiting, lambda: self._posted(spec.sampling | {"background": True, "store": True})
        )
        if created["status"] not in ("queued", "in_progress"):
            raise StreamFailed(f"a background response begins as {created['status']}", "identity")
        seen.identity.keep("id", created["id"])
        rng = random.Random(spec.index)
        while not seen.is_over:
            for event in await self._patiently(waiting, lambda: self._next_events(created["id"], seen.cursor, rng)):
                yield seen.piece(event)
        seen.check_whole(await self._patiently(waiting, lambda: self._stored(created["id"])))

    async def _next_events(self, name: str, cursor: int, rng: random.Random) -> list[Event]:
        """Some of those behind the cursor, over a connection of their own; fewer where it breaks."""
        query = {"stream": "true"} | ({} if cursor < 0 else {"starting_after": str(cursor)})
        found: list[Event] = []
        most = rng.randint(3, 40)
        async with (
            self._http.stream("GET", f"{self._url()}/{name}", params=query) as answer,
            aclosing(events(answer, _is_last)) as coming,  # type: ignore[type-var]
        ):
            try:
                async for event in coming:
                    found.append(event)
                    if len(found) == most:
                        break
            except (httpx.HTTPError, StreamFailed):
                if not found:
                    raise
        return found

    async def _patiently(self, waiting: Waiting, once: Callable[[], Awaitable[Result]]) -> Result:
        """Again and again while there is no server."""
        while True:
            try:
                result = await once()
            except httpx.HTTPError as error:
                await waiting.again(StreamFailed(f"{type(error).__name__}: {error}", "connection"))
            except StreamFailed as error:
                await waiting.again(error)
            else:
                waiting.served()
                return result

    async def _posted(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._http.post(self._url(), json=body)
        if answer.status_code != 200:
            raise StreamFailed(answer.text, str(answer.status_code))
        document: dict[str, Any] = answer.json()
        return document

    async def _stored(self, name: str) -> dict[str, Any]:
        answer = await self._http.get(f"{self._url()}/{name}")
        if answer.status_code != 200:
            raise StreamFailed(answer.text, str(answer.status_code))
        document: dict[str, Any] = answer.json()
        return document

    def _url(self) -> str:
        return f"http://{self._address()}{_PATH}"


def _is_last(event: Event) -> bool:
    return event["type"] in _LAST


class _Reading:
    """One response as far as it was read. Owner: its reader."""

    def __init__(self) -> None:
        self.identity = Identity()
        self.cursor = -1
        self.is_over = False
        self._texts: dict[str, str] = {}
        self._last: dict[str, str] = {}

    def piece(self, event: Event) -> Piece:
        if event["type"] == "error":
            raise StreamFailed(json.dumps(event))
        if event["sequence_number"] != self.cursor + 1:
            raise StreamFailed(f"event {event['sequence_number']} came after {self.cursor}", "identity")
        self.cursor += 1
        parts = list(self._parts(event))
        for name, text in parts:
            self._texts[name] = self._texts.get(name, "") + text
        if _is_last(event):
            self.check_whole(event["response"])
            self.is_over = True
            self._last = dict(_ending(event["response"]))
            parts += self._last.items()
        return Piece(parts=tuple(parts))

    def whole(self, document: dict[str, Any]) -> Piece:
        self._keep(document)
        return Piece(parts=(*_of_items(document), *_ending(document)))

    def check_whole(self, document: dict[str, Any]) -> None:
        """Raises StreamFailed where a response does not have what its events had."""
        self._keep(document)
        expected, found = {name: text for name, text in self._texts.items() if text}, dict(_of_items(document))
        if expected != {name: text for name, text in found.items() if text}:
            raise StreamFailed(f"the response has {found}, its events had {expected}", "identity")

    def _parts(self, event: Event) -> Iterator[tuple[str, str]]:
        if "response" in event:
            self._keep(event["response"])
        place = event.get("output_index")
        if "item" in event:
            self._keep_item(place, event["item"])
        if "item_id" in event:
            self.identity.keep(f"id of item {place}", event["item_id"])
        match event["type"]:
            case "response.output_item.added":
                yield f"{place} type", event["item"]["type"]
                yield f"{place} name", event["item"].get("name", "")
            case "response.output_text.delta":
                yield f"{place} text", event["delta"]
                yield f"{place} logprobs", "".join(json.dumps(entry) for entry in event.get("logprobs") or ())
            case "response.reasoning_text.delta":
                yield f"{place} reasoning", event["delta"]
            case "response.function_call_arguments.delta":
                yield f"{place} arguments", event["delta"]
            case "response.custom_tool_call_input.delta":
                yield f"{place} input", event["delta"]
            case "response.output_item.done":
                yield f"{place} sealed", event["item"].get("encrypted_content") or ""

    def _keep(self, response: dict[str, Any]) -> None:
        for name in ("id", "created_at", "model"):
            self.identity.keep(name, response[name])
        for place, item in enumerate(response["output"]):
            self._keep_item(place, item)

    def _keep_item(self, place: Any, item: dict[str, Any]) -> None:
        self.identity.keep(f"id of item {place}", item["id"])
        if "call_id" in item:
            self.identity.keep(f"id of call {place}", item["call_id"])


def _of_items(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for place, item in enumerate(document["output"]):
        yield f"{place} type", item["type"]
        yield f"{place} name", item.get("name", "")
        yield f"{place} sealed", item.get("encrypted_content") or ""
        content = item.get("content") or ()
        texts = [part["text"] for part in content] if content else [item.get("arguments", item.get("input", ""))]
        yield f"{place} {_TEXTS[item['type']]}", "".join(texts)
        entries = [entry for part in content for entry in part.get("logprobs") or ()]
        yield f"{place} logprobs", "".join(json.dumps(entry) for entry in entries)


def _ending(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if document["status"] not in ("completed", "incomplete"):
        raise StreamFailed(json.dumps(document["error"]), document["status"])
    yield "finish_reason", (document["incomplete_details"] or {"reason": "completed"})["reason"]
    usage = dict(document["usage"])
    usage.pop("input_tokens_details", None)  # what of the prompt was cached depends on what ran before
    yield "usage", json.dumps(usage, sort_keys=True)
