"""/v1/conversations: create, retrieve, change and delete conversations, and their items.

For: the OpenAI router. Does not know: how conversations are stored. Invariant: bodies are read within the server's
bounds, items are checked as those of a response's input.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import orjson
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.frontends.inference_gate import InferenceGate

from ..errors import JsonObject, OpenAIError
from ..labels import Metadata
from ..requests import check_content_type, decode_cost, json_object, read_body
from ..validation import ClosedObject, read
from ..validation import Items as ItemCount
from .conversations import MAX_ITEMS_AT_ONCE, Conversations, item_not_found
from .item_pages import item_list, page, read_page_query
from .items import Item, check_fields, full_item, item_type

T = TypeVar("T")
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


Handler = Callable[[Request], Awaitable[Response]]


class ConversationEndpoints:
    def __init__(self, gate: InferenceGate, conversations: Conversations | None, max_body_bytes: int) -> None:
        """conversations: None: the server keeps none"""
        self._gate = gate
        self._kept = conversations
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)"""
        one = "/v1/conversations/{conversation_id}"
        items = f"{one}/items"
        return [
            ("POST", "/v1/conversations", self.create),
            ("GET", one, self.retrieve),
            ("POST", one, self.update),
            ("DELETE", one, self.delete),
            ("POST", items, self.add_items),
            ("GET", items, self.list_items),
            ("GET", items + "/{item_id}", self.retrieve_item),
            ("DELETE", items + "/{item_id}", self.delete_item),
        ]

    async def create(self, http: Request) -> Response:
        def parse(body: JsonObject) -> tuple[list[JsonObject], JsonObject]:
            fields = read(ConversationBody, body)
            return _checked(body.get("items") or []), fields.metadata or {}

        items, metadata = await self._parsed(http, parse)
        return _response((await self._conversations.create(items, metadata)).body)

    async def retrieve(self, http: Request) -> Response:
        return _response((await self._conversations.get(_id(http))).body)

    async def update(self, http: Request) -> Response:
        def parse(body: JsonObject) -> JsonObject:
            return read(ConversationUpdateBody, body).metadata or {}

        metadata = await self._parsed(http, parse)
        return _response((await self._conversations.update(_id(http), metadata)).body)

    async def delete(self, http: Request) -> Response:
        await self._conversations.delete(_id(http))
        return _response(orjson.dumps({"id": _id(http), "object": "conversation.deleted", "deleted": True}))

    async def add_items(self, http: Request) -> Response:
        read_page_query({name: value for name, value in http.query_params.items() if name.startswith("include")})

        def parse(body: JsonObject) -> list[JsonObject]:
            read(ConversationItemsBody, body)
            return _checked(body["items"])

        items = await self._parsed(http, parse)
        added = await self._conversations.add(_id(http), items)
        return await self._json(lambda: item_list(added))

    async def list_items(self, http: Request) -> Response:
        query = read_page_query(http.query_params)
        items = await self._conversations.items(_id(http))
        return await self._json(lambda: page(items, query))

    async def retrieve_item(self, http: Request) -> Response:
        id, item_id = _id(http), http.path_params["item_id"]
        items = await self._conversations.items(id)

        def found() -> JsonObject:
            item = next((item for item in items if item["id"] == item_id), None)
            if item is None:
                raise item_not_found(id, item_id)
            return item

        return await self._json(found)

    async def delete_item(self, http: Request) -> Response:
        document = await self._conversations.remove(_id(http), http.path_params["item_id"])
        return _response(document.body)

    @property
    def _conversations(self) -> Conversations:
        if self._kept is None:
            message = "this server keeps no conversations"
            raise OpenAIError(message, status=404, code="unsupported")
        return self._kept

    async def _parsed(self, http: Request, parse: Callable[[JsonObject], T]) -> T:
        check_content_type(http)
        body = await read_body(self._gate, http, self._max_body_bytes)
        return await self._gate.decode_in_thread(decode_cost(body), lambda: parse(json_object(body)))

    async def _json(self, make: Callable[[], JsonObject]) -> Response:
        """JSON of a part of a conversation, which is looked for where nobody waits."""
        return _response(await self._gate.run_in_thread(lambda: orjson.dumps(make())))


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


def _response(body: bytes) -> Response:
    return Response(body, media_type="application/json")
