"""/v1/responses/{id}: retrieve a stored response, whole or as its events, cancel or delete it, list its input items.

For: the OpenAI router. Does not know: how responses are made or kept. Invariants: a client gets at its own responses
only, another's is a 404; documents are parsed off the event loop.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ...generation.sealed_reasoning import SealingKey
from ...http.openai_errors import JsonObject, OpenAIError, refuse
from ...http.routing import delete, get, post
from ...inference_gate import InferenceGate
from ...journals.documents import Document
from ...journals.response_store import NotStoredError, ResponseStore, current_owner
from ..endpoints import OpenAIEndpoints, json_answer
from .background import BackgroundResponses
from .conversations import PAGE_PARAMETERS, page, read_page_query
from .events import journal_stream
from .http_types import ItemList, ResponseDeleted, ResponseObject
from .schema import ENCRYPTED_REASONING, INCLUDABLE

_PARAMETERS = ("include", "include[]", "include_obfuscation", "starting_after", "stream")
_MAX_DIGITS = 9


_ONE = "/v1/responses/{response_id}"
_CURSOR: tuple[JsonObject, ...] = (
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}, "description": "Its events instead of it."},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
)


class StoredResponseEndpoints(OpenAIEndpoints):
    def __init__(
        self,
        gate: InferenceGate,
        store: ResponseStore | None,
        background: BackgroundResponses | None,
        key: SealingKey,
    ) -> None:
        """store: None: the server keeps none"""
        super().__init__(gate)
        self._kept = store
        self._background = background
        self._key = key

    @get(_ONE, answer=ResponseObject, parameters=_CURSOR, streams="It, or with `stream` its events.")
    async def retrieve(self, http: Request) -> Response:
        """A stored response"""
        query = http.query_params
        included = _included(query)
        is_stream, after = _cursor(query)
        document = await self._document(http)
        if is_stream:
            return await self._stream(document, after)
        if ENCRYPTED_REASONING in included:
            return await self._json(len(document.body), lambda: _with_sealed_reasoning(document.body, self._key))
        return json_answer(document.body)

    @delete(_ONE, answer=ResponseDeleted)
    async def delete_response(self, http: Request) -> Response:
        """Delete a response"""
        document = await self._document(http)
        if self._background is not None:
            await self._background.cancel(document.id)
        await self._store.delete(current_owner(), "response", document.id)
        return json_answer(orjson.dumps({"id": document.id, "object": "response.deleted", "deleted": True}))

    @post(f"{_ONE}/cancel", answer=ResponseObject)
    async def cancel(self, http: Request) -> Response:
        """Cancel a background response"""
        document = await self._document(http)
        body = await self._gate.decode_in_thread(len(document.body), lambda: orjson.loads(document.body))
        if not body.get("background"):
            raise OpenAIError(
                f"The response '{document.id}' was not created with 'background': true", param="background"
            )
        if self._background is not None:
            await self._background.cancel(document.id)
        document = await self._document(http)
        if document.is_live:
            message = f"The response '{document.id}' is being made by another server, which alone can cancel it"
            raise OpenAIError(message, status=409, code="made_elsewhere")
        return json_answer(document.body)

    @get(f"{_ONE}/input_items", answer=ItemList, parameters=PAGE_PARAMETERS)
    async def input_items(self, http: Request) -> Response:
        """What a response was made from"""
        query = read_page_query(http.query_params)
        document = await self._document(http)
        return await self._json(len(document.items), lambda: page(orjson.loads(document.items), query))

    @property
    def _store(self) -> ResponseStore:
        if self._kept is None:
            raise OpenAIError("this server keeps no responses", status=404, code="unsupported")
        return self._kept

    async def _document(self, http: Request) -> Document:
        id = http.path_params["response_id"]
        try:
            return await self._store.get(current_owner(), "response", id)
        except NotStoredError:
            raise OpenAIError(
                f"Response with id '{id[:80]}' not found.", status=404, code="response_not_found"
            ) from None

    async def _stream(self, document: Document, after: int) -> Response:
        journal = await self._store.journal(document)
        if journal.has_ended and not journal.next_number:
            message = f"The response '{document.id}' has no events: only those of background responses are kept"
            raise OpenAIError(message, param="stream", code="unsupported_value")
        if after >= journal.next_number:
            raise refuse("starting_after", f"at most {journal.next_number - 1}, the latest event", after)
        return journal_stream(journal, after)

    async def _json(self, size_bytes: int, make: Callable[[], JsonObject]) -> Response:
        return json_answer(await self._gate.decode_in_thread(size_bytes, lambda: orjson.dumps(make())))


def _included(query: Mapping[str, str]) -> set[str]:
    """Raises OpenAIError for a query parameter that this endpoint has not."""
    for name in query:
        if name not in _PARAMETERS:
            raise OpenAIError(f"unknown query parameter '{name[:80]}'", param=name[:80], code="unknown_parameter")
    if query.get("include_obfuscation", "false") != "false":
        message = "'include_obfuscation' is not supported: events are stored as they were sent"
        raise OpenAIError(message, param="include_obfuscation", code="unsupported_parameter")
    found = {one for name in ("include", "include[]") for one in query.get(name, "").split(",") if one}
    if unknown := sorted(found - set(INCLUDABLE)):
        raise refuse("include", f"one of {', '.join(INCLUDABLE)}", unknown[0])
    return found


def _cursor(query: Mapping[str, str]) -> tuple[bool, int]:
    """Whether events are asked for, and behind which number."""
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise refuse("stream", "true or false", stream)
    if after is None:
        return stream == "true", -1
    if stream == "false":
        raise refuse("starting_after", "to be sent only with stream=true", after)
    if not (after.isascii() and after.isdigit() and len(after) <= _MAX_DIGITS):
        raise refuse("starting_after", "the sequence_number of an event", after)
    return True, int(after)


def _with_sealed_reasoning(body: bytes, key: SealingKey) -> JsonObject:
    """The response as if its request had included the sealed form of its reasoning."""
    response: JsonObject = orjson.loads(body)
    for item in response.get("output", ()):
        if item["type"] == "reasoning" and "encrypted_content" not in item:
            text = "".join(part["text"] for part in item.get("content", ()))
            item["encrypted_content"] = key.seal(text)
    return response
