"""Conversations: stored lists of items that responses continue, and that clients change through /v1/conversations.

Invariants: only its owner gets a conversation; this server applies the changes of a conversation one after another;
items are checked like those of a response's input; JSON that grows with a conversation is read and written off the
event loop. Source: OpenAI's API reference.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

import orjson
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from ...generation.validation import ClosedObject, read
from ...generation.validation import Items as ItemCount
from ...http.errors import JsonObject, OpenAIError
from ...http.routing import delete, get, post
from ...inference_gate import InferenceGate
from ...journals.documents import Document, Put
from ...journals.response_store import NotStoredError, ResponseStore, current_owner
from ..endpoints import PAGE_PARAMETERS, OpenAIEndpoints, item_list, json_answer, page, read_include, read_page_query
from ..fields import Metadata
from .items import Item, check_fields, full_item, item_type
from .output_items import item_id
from .schema import INCLUDABLE, ConversationDeleted, ConversationObject, ItemList, StoredItem

ID_PREFIX = "conv_"
MAX_ITEMS_AT_ONCE = 20
"""Limit of one call; OpenAI has the same."""
Items = list[JsonObject]


class Conversations:
    """Used on one event loop."""

    def __init__(self, store: ResponseStore, gate: InferenceGate, max_bytes: int) -> None:
        """max_bytes: limit of the items of a conversation as JSON"""
        self._store = store
        self._gate = gate
        self._max_bytes = max_bytes

    async def create(self, items: Sequence[JsonObject], metadata: JsonObject) -> Document:
        id, created_s = ID_PREFIX + uuid.uuid4().hex, int(self._store.clock_s())
        text = orjson.dumps(with_new_ids(items))
        self._check_size(text)
        document = Document(
            owner=current_owner(),
            kind="conversation",
            id=id,
            body=orjson.dumps({"id": id, "object": "conversation", "created_at": created_s, "metadata": metadata}),
            created_s=created_s,
            expires_s=self._store.expires_s(created_s),
            items=text,
        )
        await self._store.put(document)
        return document

    async def get(self, id: str) -> Document:
        """Raises NotStoredError."""
        return await self._store.get(current_owner(), "conversation", id)

    async def items(self, id: str) -> Items:
        """All items, oldest first."""
        return await self.read(await self.get(id))

    async def update(self, id: str, metadata: JsonObject) -> Document:
        async with self._store.lock(id):
            document = await self.get(id)
            body = orjson.loads(document.body) | {"metadata": metadata}
            return await self._put(replace(document, body=orjson.dumps(body)))

    async def delete(self, id: str) -> None:
        async with self._store.lock(id):
            await self._store.delete(current_owner(), "conversation", id)

    async def add(self, id: str, items: Sequence[JsonObject]) -> Items:
        """Returns the added items with their ids."""
        added = with_new_ids(items)
        await self._change(current_owner(), id, lambda before: [*before, *added], self._check_size)
        return added

    async def remove(self, id: str, item_id: str) -> Document:
        def without(before: Items) -> Items:
            after = [item for item in before if item["id"] != item_id]
            if len(after) == len(before):
                raise item_not_found(id, item_id)
            return after

        return await self._change(current_owner(), id, without)

    async def append_answer(self, owner: str, id: str, items: bytes, beside: Sequence[Put] = ()) -> bool:
        """items: JSON of a response's input and output with ids. beside: stored in the same transaction, so that a
        retry after a failure does not add its items twice.

        Items that were already added are skipped: a server may have died between this call and the end of the response.
        Returns False, and stores nothing, if the conversation was deleted in the meantime. One that is too long is
        refused by the next request."""

        def longer(before: Items) -> Items:
            known = {item["id"] for item in before}
            return [*before, *(item for item in orjson.loads(items) if item["id"] not in known)]

        try:
            await self._change(owner, id, longer, more_bytes=len(items), beside=beside)
        except NotStoredError:
            return False
        return True

    async def _change(
        self,
        owner: str,
        id: str,
        change: Callable[[Items], Items],
        check: Callable[[bytes], None] | None = None,
        more_bytes: int = 0,
        beside: Sequence[Put] = (),
    ) -> Document:
        """more_bytes: how much JSON `change` reads in addition to the items. beside: stored in the same transaction"""
        async with self._store.lock(id):
            document = await self._store.get(owner, "conversation", id)
            text = await self._gate.decode_in_thread(
                len(document.items) + more_bytes, lambda: orjson.dumps(change(orjson.loads(document.items)))
            )
            if check is not None:
                check(text)
            return await self._put(replace(document, items=text), beside)

    async def _put(self, document: Document, beside: Sequence[Put] = ()) -> Document:
        """Stores the document; also extends its time to live."""
        kept = replace(document, expires_s=self._store.expires_s(self._store.clock_s()))
        await self._store.put_all([Put(kept), *beside])
        return kept

    async def read(self, document: Document) -> Items:
        """The items of a document."""
        items: Items = await self._gate.decode_in_thread(len(document.items), lambda: orjson.loads(document.items))
        return items

    def _check_size(self, items: bytes) -> None:
        if len(items) > self._max_bytes:
            message = f"the conversation would have {len(items)} bytes of items, expected at most {self._max_bytes}"
            raise OpenAIError(message, param="items", code="invalid_value")


def with_new_ids(items: Sequence[JsonObject]) -> Items:
    """Complete items with new ids, because a client's id may belong to another item."""
    seed = uuid.uuid4().hex
    return [item | {"id": item_id(str(item["type"]), seed, "i", index)} for index, item in enumerate(items)]


def item_not_found(id: str, item_id: str) -> OpenAIError:
    message = f"Item with id '{item_id[:80]}' not found in conversation with id '{id[:80]}'."
    return OpenAIError(message, status=404, code="not_found")


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
    documents = "conversations"

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
        """Retrieve a conversation"""
        return json_answer((await self._conversations.get(_id(http))).body)

    @post(_ONE, body=ConversationUpdateBody, answer=ConversationObject)
    async def update(self, http: Request) -> Response:
        """Change a conversation's metadata"""
        metadata = await self.parsed(http, lambda body: read(ConversationUpdateBody, body).metadata or {})
        return json_answer((await self._conversations.update(_id(http), metadata)).body)

    @delete(_ONE, answer=ConversationDeleted)
    async def delete_conversation(self, http: Request) -> Response:
        """Delete a conversation and its items"""
        await self._conversations.delete(_id(http))
        return json_answer(orjson.dumps({"id": _id(http), "object": "conversation.deleted", "deleted": True}))

    @post(_ITEMS, body=ConversationItemsBody, answer=ItemList)
    async def add_items(self, http: Request) -> Response:
        """Add items to a conversation"""
        read_include(http.query_params, INCLUDABLE)

        def parse(body: JsonObject) -> list[JsonObject]:
            read(ConversationItemsBody, body)
            return _checked(body["items"])

        items = await self.parsed(http, parse)
        added = await self._conversations.add(_id(http), items)
        return await self._json(lambda: item_list(added))

    @get(_ITEMS, answer=ItemList, parameters=PAGE_PARAMETERS)
    async def list_items(self, http: Request) -> Response:
        """List a conversation's items"""
        query = read_page_query(http.query_params, INCLUDABLE)
        items = await self._conversations.items(_id(http))
        return await self._json(lambda: page(items, query))

    @get(_ITEM, answer=StoredItem)
    async def retrieve_item(self, http: Request) -> Response:
        """Retrieve an item"""
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
        return Conversations(self._store, self._gate, self._max_body_bytes)

    async def _json(self, make: Callable[[], JsonObject]) -> Response:
        """Creates and encodes JSON in a thread."""
        return json_answer(await self._gate.run_in_thread(lambda: orjson.dumps(make())))


def _checked(items: list[JsonObject]) -> list[JsonObject]:
    check_fields(items, "items")
    for index, item in enumerate(items):
        if item_type(item) == "item_reference":
            param = f"items[{index}].type"
            message = f"'{param}' is \"item_reference\", which is not supported in conversations"
            raise OpenAIError(message, param=param, code="unsupported_parameter")
    return [full_item(item) for item in items]


def _id(http: Request) -> str:
    id: str = http.path_params["conversation_id"]
    return id
