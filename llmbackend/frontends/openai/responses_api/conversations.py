"""Conversations: stored lists of items that responses go on behind, and that clients change.

For: the endpoints of conversations, and the one that creates responses. Does not know: HTTP, how items become a prompt.
Invariants: a client gets at its own conversations only; changes of one conversation by this server come one after the
other, so that none is lost; JSON in proportion to a conversation is read and written off the event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import orjson

from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.documents import Document
from llmbackend.frontends.journals.response_store import NotStoredError, ResponseStore, current_owner

from ..errors import JsonObject, OpenAIError
from .output_items import item_id

ID_PREFIX = "conv_"
MAX_ITEMS_AT_ONCE = 20
"""That a client adds with one call; OpenAI's limit."""
Items = list[JsonObject]


class Conversations:
    """Used on one event loop."""

    def __init__(self, store: ResponseStore, gate: InferenceGate, max_bytes: int) -> None:
        """max_bytes: of one conversation's items, as JSON"""
        self._store = store
        self._gate = gate
        self._max_bytes = max_bytes
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

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
        """Raises OpenAIError 404."""
        return await self._get(current_owner(), id)

    async def items(self, id: str) -> Items:
        """All of them, the oldest first."""
        return await self.read(await self.get(id))

    async def update(self, id: str, metadata: JsonObject) -> Document:
        async with self._lock(id):
            document = await self.get(id)
            body = orjson.loads(document.body) | {"metadata": metadata}
            return await self._put(replace(document, body=orjson.dumps(body)))

    async def delete(self, id: str) -> None:
        async with self._lock(id):
            try:
                await self._store.delete(current_owner(), "conversation", id)
            except NotStoredError:
                raise _not_found(id) from None

    async def add(self, id: str, items: Sequence[JsonObject]) -> Items:
        """Those that were added, with their ids."""
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

    async def append_answer(self, owner: str, id: str, items: bytes) -> None:
        """What a response was asked and has answered, JSON of items with ids; those that are there already, since the
        server died between this and the response's end, are not added again. The response has its end: a conversation
        that was deleted meanwhile is none to add to, and one that grew too long is refused by the next request."""

        def longer(before: Items) -> Items:
            known = {item["id"] for item in before}
            return [*before, *(item for item in orjson.loads(items) if item["id"] not in known)]

        try:
            await self._change(owner, id, longer, more_bytes=len(items))
        except OpenAIError as error:
            if error.status != 404:
                raise

    async def _change(
        self,
        owner: str,
        id: str,
        change: Callable[[Items], Items],
        check: Callable[[bytes], None] | None = None,
        more_bytes: int = 0,
    ) -> Document:
        """more_bytes: what `change` has to read"""
        async with self._lock(id):
            document = await self._get(owner, id)
            text = await self._gate.decode_in_thread(
                len(document.items) + more_bytes, lambda: orjson.dumps(change(orjson.loads(document.items)))
            )
            if check is not None:
                check(text)
            return await self._put(replace(document, items=text))

    async def _put(self, document: Document) -> Document:
        """Kept for as long again as a new one."""
        kept = replace(document, expires_s=self._store.expires_s(self._store.clock_s()))
        await self._store.put(kept)
        return kept

    async def _get(self, owner: str, id: str) -> Document:
        try:
            return await self._store.get(owner, "conversation", id)
        except NotStoredError:
            raise _not_found(id) from None

    async def read(self, document: Document) -> Items:
        """The items of a document that `get` gave."""
        items: Items = await self._gate.decode_in_thread(len(document.items), lambda: orjson.loads(document.items))
        return items

    def _check_size(self, items: bytes) -> None:
        if len(items) > self._max_bytes:
            message = f"the conversation would have {len(items)} bytes of items, expected at most {self._max_bytes}"
            raise OpenAIError(message, param="items", code="invalid_value")

    def _lock(self, id: str) -> asyncio.Lock:
        lock = self._changing.get(id)
        if lock is None:
            lock = self._changing[id] = asyncio.Lock()
        return lock


def with_new_ids(items: Sequence[JsonObject]) -> Items:
    """Full items under ids of their own: an id that a client brings may stand for another item already."""
    seed = uuid.uuid4().hex
    return [item | {"id": item_id(str(item["type"]), seed, "i", index)} for index, item in enumerate(items)]


def _not_found(id: str) -> OpenAIError:
    return OpenAIError(f"Conversation with id '{id[:80]}' not found.", status=404, code="not_found")


def item_not_found(id: str, item_id: str) -> OpenAIError:
    message = f"Item with id '{item_id[:80]}' not found in conversation with id '{id[:80]}'."
    return OpenAIError(message, status=404, code="not_found")
