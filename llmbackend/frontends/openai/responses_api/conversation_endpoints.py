"""/v1/conversations: create, retrieve, change and delete conversations, and their items.

For: the OpenAI router. Does not know: how conversations are stored. Invariant: bodies are read within the server's
bounds, items are checked as those of a response's input.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import orjson
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.frontends.http.routing import delete, get, post
from llmbackend.frontends.inference_gate import InferenceGate

from ..endpoints import OpenAIEndpoints, json_answer
from ..errors import JsonObject, OpenAIError
from ..labels import Metadata
from ..validation import ClosedObject, read
from ..validation import Items as ItemCount
from .conversations import MAX_ITEMS_AT_ONCE, Conversations, item_not_found
from .http_types import ConversationDeleted, ConversationObject, ItemList, StoredItem
from .item_pages import PAGE_PARAMETERS, item_list, page, read_page_query
from .items import Item, check_fields, full_item, item_type

_Items = Annotated[list[Item], ItemCount(0, MAX_ITEMS_AT_ONCE)]


class ConversationBody(ClosedObject):
    model_config = ConfigDict(defer_build=False)
    items: _Items | None = None
    metadata: Metadata = None


class ConversationUpdateBody(ClosedObject):
    model_config = ConfigDict(defer_build=False)
    metadata: Metadata


class ConversationItemsBody(ClosedObject):
    model_config = ConfigDict(defer_build=False)
    items: _Items


_ONE = "/v1/conversations/{conversation_id}"
_ITEMS = f"{_ONE}/items"
_ITEM = _ITEMS + "/{item_id}"


class ConversationEndpoints(OpenAIEndpoints):
    def __init__(self, gate: InferenceGate, conversations: Conversations | None, max_body_bytes: int) -> None:
        """conversations: None: the server keeps none"""
        super().__init__(gate, max_body_bytes)
        self._kept = conversations

    @post("/v1/conversations", body=ConversationBody, answer=ConversationObject)
    async def create(self, http: Request) -> Response:
        """Create a conversation"""

        def parse(body: JsonObject) -> tuple[list[JsonObject], JsonObject]:
            fields = read(ConversationBody, body)
            return _checked(body.get("items") or []), fields.metadata or {}

        items, metadata = await self.parsed(http, parse)
        return json_answer((await self._conversations.create(items, metadata)).body)

    @get(_ONE, answer=ConversationObject)
    async def retrieve(self, http: Request) -> Response:
        """One conversation"""
        return json_answer((await self._conversations.get(_id(http))).body)

    @post(_ONE, body=ConversationUpdateBody, answer=ConversationObject)
    async def update(self, http: Request) -> Response:
        """Change its metadata"""

        def parse(body: JsonObject) -> JsonObject:
            return read(ConversationUpdateBody, body).metadata or {}

        metadata = await self.parsed(http, parse)
        return json_answer((await self._conversations.update(_id(http), metadata)).body)

    @delete(_ONE, answer=ConversationDeleted)
    async def delete_conversation(self, http: Request) -> Response:
        """Delete a conversation and its items"""
        await self._conversations.delete(_id(http))
        return json_answer(orjson.dumps({"id": _id(http), "object": "conversation.deleted", "deleted": True}))

    @post(_ITEMS, body=ConversationItemsBody, answer=ItemList)
    async def add_items(self, http: Request) -> Response:
        """Add items"""
        read_page_query({name: value for name, value in http.query_params.items() if name.startswith("include")})

        def parse(body: JsonObject) -> list[JsonObject]:
            read(ConversationItemsBody, body)
            return _checked(body["items"])

        items = await self.parsed(http, parse)
        added = await self._conversations.add(_id(http), items)
        return await self._json(lambda: item_list(added))

    @get(_ITEMS, answer=ItemList, parameters=PAGE_PARAMETERS)
    async def list_items(self, http: Request) -> Response:
        """Its items"""
        query = read_page_query(http.query_params)
        items = await self._conversations.items(_id(http))
        return await self._json(lambda: page(items, query))

    @get(_ITEM, answer=StoredItem)
    async def retrieve_item(self, http: Request) -> Response:
        """One item"""
        id, item_id = _id(http), http.path_params["item_id"]
        items = await self._conversations.items(id)

        def found() -> JsonObject:
            item = next((item for item in items if item["id"] == item_id), None)
            if item is None:
                raise item_not_found(id, item_id)
            return item

        return await self._json(found)

    @delete(_ITEM, answer=ConversationObject)
    async def delete_item(self, http: Request) -> Response:
        """Remove an item"""
        document = await self._conversations.remove(_id(http), http.path_params["item_id"])
        return json_answer(document.body)

    @property
    def _conversations(self) -> Conversations:
        if self._kept is None:
            message = "this server keeps no conversations"
            raise OpenAIError(message, status=404, code="unsupported")
        return self._kept

    async def _json(self, make: Callable[[], JsonObject]) -> Response:
        """JSON of a part of a conversation, which is looked for where nobody waits."""
        return json_answer(await self._gate.run_in_thread(lambda: orjson.dumps(make())))


def _checked(items: list[JsonObject]) -> list[JsonObject]:
    check_fields(items, "items")
    for index, item in enumerate(items):
        if item_type(item) == "item_reference":
            param = f"items[{index}].type"
            message = f"'{param}' is \"item_reference\", which is not supported: a conversation has its items itself"
            raise OpenAIError(message, param=param, code="unsupported_parameter")
    return [full_item(item) for item in items]


def _id(http: Request) -> str:
    id: str = http.path_params["conversation_id"]
    return id
