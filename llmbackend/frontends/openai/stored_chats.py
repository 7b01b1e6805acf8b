"""Stored chat completions: storing one, and the endpoints to list, retrieve, change and delete them.

Invariants: only its owner gets a completion; a list takes bounded time per turn of the event loop, and no completion is
parsed on it. Source: OpenAI's API reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import orjson
from pydantic import ConfigDict
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from ..generation.answer import Identity
from ..generation.models import Target
from ..generation.request import GenerationRequest, StoredParts
from ..generation.validation import ClosedObject, read
from ..http.errors import JsonObject
from ..http.routing import delete, get, post
from ..journals.documents import Document, Kind
from ..journals.response_store import NotStoredError, ResponseStore, current_owner
from .endpoints import PAGE_PARAMETERS, OpenAIEndpoints, json_answer, not_listed, page, read_page_query
from .fields import Metadata
from .http_types import ChatDeleted, ChatList, ChatMessageList, StoredChatCompletion
from .responses_api.parsing import effective_sampling

_KIND: Kind = "chat.completion"
_METADATA = re.compile(r"metadata\[([^\]]+)\]")


class ChatKeeper:
    """Stores the answer of one request. Created when the request begins."""

    def __init__(
        self, store: ResponseStore, parts: StoredParts, request: GenerationRequest, identity: Identity, target: Target
    ) -> None:
        self._store = store
        self._owner = current_owner()
        self._parts = parts
        self._id = identity.id
        self._created_s = store.clock_s()
        sampling = effective_sampling(request.sampling, target.model.sampling_defaults)
        self._sampling = orjson.dumps(sampling)
        self._labels = _labels(identity.model, request.labels.get("metadata"))

    async def keep(self, body: bytes) -> None:
        """body: the answer as JSON. Raises StoreError."""
        document = Document(
            owner=self._owner,
            kind=_KIND,
            id=self._id,
            body=b"%b,%b,%b" % (body[:-1], self._sampling[1:-1], self._parts.fields[1:]),
            created_s=self._created_s,
            expires_s=self._store.expires_s(self._created_s),
            items=self._parts.messages,
            labels=self._labels,
        )
        await self._store.put(document)


def _labels(model: str, metadata: Mapping[str, str] | None) -> bytes:
    return orjson.dumps({"model": model, "metadata": metadata or {}})


class ChatUpdateBody(ClosedObject):
    model_config = ConfigDict(defer_build=False)
    metadata: Metadata


_ALL = "/v1/chat/completions"
_ONE = _ALL + "/{completion_id}"
_FILTERS: tuple[JsonObject, ...] = (
    {"name": "model", "in": "query", "schema": {"type": "string"}},
    {
        "name": "metadata",
        "in": "query",
        "style": "deepObject",
        "explode": True,
        "schema": {"type": "object", "additionalProperties": {"type": "string"}},
        "description": "Only completions with these pairs: `metadata[key]=value`.",
    },
)


class StoredChatEndpoints(OpenAIEndpoints):
    documents = "chat completions"

    @get(_ALL, answer=ChatList, parameters=(*PAGE_PARAMETERS, *_FILTERS))
    async def list_completions(self, http: Request) -> Response:
        """List stored chat completions, oldest first unless `order` is desc"""
        paging, model, metadata = _read_list_query(http.query_params)
        query = read_page_query(paging, default_order="asc")

        def matches(labels: bytes) -> bool:
            found = orjson.loads(labels)
            return model in (None, found["model"]) and all(
                found["metadata"].get(key) == metadata[key] for key in metadata
            )

        try:
            found, has_more = await self._store.page(
                current_owner(), _KIND, query.after, query.limit, is_descending=query.is_descending, matches=matches
            )
        except NotStoredError as error:
            raise not_listed(error.id) from None
        ids = orjson.dumps(
            {
                "first_id": found[0].id if found else None,
                "last_id": found[-1].id if found else None,
                "has_more": has_more,
            }
        )
        return json_answer(b'{"object":"list","data":[%b],%b' % (b",".join(map(_completion, found)), ids[1:]))

    @get(_ONE, answer=StoredChatCompletion)
    async def retrieve(self, http: Request) -> Response:
        """Retrieve a stored chat completion"""
        return json_answer(_completion(await self._document(http)))

    @post(_ONE, body=ChatUpdateBody, answer=StoredChatCompletion)
    async def update(self, http: Request) -> Response:
        """Change the metadata of a stored chat completion"""
        metadata = await self.parsed(http, lambda body: read(ChatUpdateBody, body).metadata)
        async with self._store.lock(_id(http)):
            document = await self._document(http)
            labels = _labels(orjson.loads(document.labels)["model"], metadata)
            document = replace(document, labels=labels)
            await self._store.put(document)
        return json_answer(_completion(document))

    @delete(_ONE, answer=ChatDeleted)
    async def delete_completion(self, http: Request) -> Response:
        """Delete a stored chat completion"""
        id = _id(http)
        async with self._store.lock(id):
            await self._store.delete(current_owner(), _KIND, id)
        return json_answer(orjson.dumps({"object": "chat.completion.deleted", "id": id, "deleted": True}))

    @get(f"{_ONE}/messages", answer=ChatMessageList, parameters=PAGE_PARAMETERS)
    async def messages(self, http: Request) -> Response:
        """List the messages of its request, oldest first unless `order` is desc"""
        query = read_page_query(http.query_params, default_order="asc")
        document = await self._document(http)

        def listed() -> bytes:
            messages = enumerate(orjson.loads(document.items))
            return orjson.dumps(page([_message(document.id, index, message) for index, message in messages], query))

        return json_answer(await self._gate.decode_in_thread(len(document.items), listed))

    async def _document(self, http: Request) -> Document:
        return await self._store.get(current_owner(), _KIND, _id(http))


def _id(http: Request) -> str:
    id: str = http.path_params["completion_id"]
    return id


def _completion(document: Document) -> bytes:
    metadata = orjson.loads(document.labels)["metadata"]
    return b'%b,"metadata":%b}' % (document.body[:-1], orjson.dumps(metadata))


def _message(id: str, index: int, message: JsonObject) -> JsonObject:
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    own = {"content": content if parts is None else None, "content_parts": parts, "name": message.get("name")}
    return message | own | {"id": f"{id}-{index}"}


def _read_list_query(parameters: Mapping[str, str]) -> tuple[QueryParams, str | None, dict[str, str]]:
    """Returns (parameters of the page, model, metadata)."""
    paging, metadata, model = {}, {}, None
    for name, value in parameters.items():
        if name == "model":
            model = value
        elif (found := _METADATA.fullmatch(name)) is not None:
            metadata[found[1]] = value
        else:
            paging[name] = value
    return QueryParams(paging), model, metadata
