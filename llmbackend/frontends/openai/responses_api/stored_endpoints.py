"""/v1/responses/{id}: retrieve a stored response, whole or as its events, cancel or delete it, list its input items.

For: the OpenAI router. Does not know: how responses are made or kept. Invariants: a client gets at its own responses
only, another's is a 404; documents are parsed off the event loop.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.documents import Document
from llmbackend.frontends.journals.response_store import NotStoredError, ResponseStore, current_owner

from ..errors import JsonObject, OpenAIError, refuse
from ..sealed_reasoning import SealingKey
from .background import BackgroundResponses
from .item_pages import page, read_page_query
from .journal_stream import journal_stream
from .request import ENCRYPTED_REASONING
from .schema import INCLUDABLE

Handler = Callable[[Request], Awaitable[Response]]
_PARAMETERS = ("include", "include[]", "include_obfuscation", "starting_after", "stream")
_MAX_DIGITS = 9


class StoredResponseEndpoints:
    def __init__(
        self,
        gate: InferenceGate,
        store: ResponseStore | None,
        background: BackgroundResponses | None,
        key: SealingKey,
    ) -> None:
        """store: None: the server keeps none"""
        self._gate = gate
        self._kept = store
        self._background = background
        self._key = key

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)"""
        one = "/v1/responses/{response_id}"
        return [
            ("GET", one, self.retrieve),
            ("DELETE", one, self.delete),
            ("POST", f"{one}/cancel", self.cancel),
            ("GET", f"{one}/input_items", self.input_items),
        ]

    async def retrieve(self, http: Request) -> Response:
        query = http.query_params
        included = _included(query)
        is_stream, after = _cursor(query)
        document = await self._document(http)
        if is_stream:
            return await self._stream(document, after)
        if ENCRYPTED_REASONING in included:
            return await self._json(len(document.body), lambda: _with_sealed_reasoning(document.body, self._key))
        return _response(document.body)

    async def delete(self, http: Request) -> Response:
        document = await self._document(http)
        if self._background is not None:
            await self._background.cancel(document.id)
        await self._store.delete(current_owner(), "response", document.id)
        return _response(orjson.dumps({"id": document.id, "object": "response.deleted", "deleted": True}))

    async def cancel(self, http: Request) -> Response:
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
        return _response(document.body)

    async def input_items(self, http: Request) -> Response:
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
        return _response(await self._gate.decode_in_thread(size_bytes, lambda: orjson.dumps(make())))


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


def _response(body: bytes) -> Response:
    return Response(body, media_type="application/json")
