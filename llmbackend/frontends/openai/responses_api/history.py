"""What a request continues from, out of the store: the items of earlier responses, and items that it refers to.

For: the endpoint that creates responses. Does not know: how items become a prompt. Invariant: a client gets at its own
responses only; documents are parsed off the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import orjson

from ...http.errors import JsonObject, OpenAIError
from ...inference_gate import InferenceGate
from ...journals.documents import Document
from ...journals.response_store import (
    LineageTooLongError,
    NotStoredError,
    ResponseStore,
    current_owner,
)
from .conversations import Conversations
from .output_items import item_id, response_of
from .parsing import NO_HISTORY, History, WantedHistory

_PREVIOUS = "previous_response_id"
_CONVERSATION = "conversation"
_MAX_REFERENCES = 256


async def fetch_history(
    store: ResponseStore | None,
    conversations: Conversations | None,
    wanted: WantedHistory,
    gate: InferenceGate,
    max_bytes: int,
) -> History:
    """max_bytes: of all that is read. Raises OpenAIError naming what is not there."""
    if wanted.is_empty:
        return NO_HISTORY
    if store is None or conversations is None:
        field = _CONVERSATION if wanted.conversation else _PREVIOUS if wanted.previous_response_id else "input"
        raise OpenAIError(
            f"'{field}' is not supported: this server stores no responses", param=field, code="unsupported"
        )
    previous = await _lineage(store, wanted.previous_response_id, max_bytes)
    referred = await _referred(store, wanted.item_ids, max_bytes)
    items: list[JsonObject] | None = None
    size_bytes = sum(document.size_bytes for document in (*previous, *referred))
    if wanted.conversation is not None:
        items, conversation_bytes = await _conversation(conversations, wanted.conversation, max_bytes)
        size_bytes += conversation_bytes
    return await gate.run_in_thread(partial(_history, wanted, previous, referred, items, size_bytes))


def _history(
    wanted: WantedHistory,
    previous: list[Document],
    referred: list[Document],
    conversation: list[JsonObject] | None,
    size_bytes: int,
) -> History:
    items = tuple(_items(previous) if conversation is None else conversation)
    by_id = {item["id"]: item for item in (*items, *_items(referred)) if "id" in item}
    return History(items, {id: by_id[id] for id in wanted.item_ids if id in by_id}, size_bytes)


async def _conversation(conversations: Conversations, id: str, max_bytes: int) -> tuple[list[JsonObject], int]:
    """Its items, and the size of their JSON."""
    try:
        document = await conversations.get(id)
    except OpenAIError as error:
        error.param = error.param or _CONVERSATION
        raise
    if len(document.items) > max_bytes:
        message = f"'{_CONVERSATION}': the conversation has {len(document.items)} bytes, expected at most {max_bytes}"
        raise OpenAIError(message, param=_CONVERSATION, code="invalid_value")
    return await conversations.read(document), len(document.items)


async def _lineage(store: ResponseStore, id: str | None, max_bytes: int) -> list[Document]:
    if id is None:
        return []
    try:
        found = await store.lineage(current_owner(), "response", id, max_bytes)
    except NotStoredError as error:
        message = f"Previous response with id '{str(error)[:80]}' not found."
        raise OpenAIError(message, param=_PREVIOUS, code="previous_response_not_found") from None
    except LineageTooLongError as error:
        message = f"'{_PREVIOUS}': the history of the response is too long, expected {error}"
        raise OpenAIError(message, param=_PREVIOUS, code="invalid_value") from None
    if found[-1].is_live:
        message = f"'{_PREVIOUS}': the response '{id}' is still in progress"
        raise OpenAIError(message, param=_PREVIOUS, code="invalid_value")
    return found


async def _referred(store: ResponseStore, item_ids: tuple[str, ...], max_bytes: int) -> list[Document]:
    if len(item_ids) > _MAX_REFERENCES:
        message = f"'input' refers to {len(item_ids)} items, expected at most {_MAX_REFERENCES}"
        raise OpenAIError(message, param="input", code="invalid_value")
    found: list[Document] = []
    for id in dict.fromkeys(map(response_of, item_ids)):
        if id is not None:
            with suppress(NotStoredError):  # the parser names the item
                document = await store.get(current_owner(), "response", id)
                max_bytes -= document.size_bytes
                found.append(document)
        if max_bytes < 0:
            message = "'input' refers to items of responses that are too long to read"
            raise OpenAIError(message, param="input", code="invalid_value")
    return found


def _items(documents: Iterable[Document]) -> Iterable[JsonObject]:
    for document in documents:
        yield from orjson.loads(document.items)
        yield from orjson.loads(document.body).get("output", ())


def with_ids(items: Iterable[JsonObject], response_id: str) -> list[JsonObject]:
    """Input items as they are stored and listed."""
    named = partial(item_id, response_id=response_id, side="i")
    return [
        item if item.get("id") else {"id": named(item["type"], index=index), **item} for index, item in enumerate(items)
    ]
