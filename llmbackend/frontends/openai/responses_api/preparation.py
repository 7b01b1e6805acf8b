"""Prepares a create-response request: fetches its history and does all work that grows with its body.

Invariants: only the owner can continue a stored response; documents are parsed off the event loop. Source: OpenAI's API
reference.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import orjson

from ...generation.answer import Identity
from ...generation.models import Target
from ...generation.plan import AnswerPlan
from ...generation.sealed_reasoning import SealingKey
from ...http.errors import JsonObject, OpenAIError
from ...inference_gate import InferenceGate
from ...journals.documents import Document, Put
from ...journals.response_store import LineageTooLongError, NotStoredError, ResponseStore, current_owner
from ..endpoints import not_found
from .conversations import Conversations
from .output_items import ID_PREFIX, item_id, response_of
from .parsing import NO_HISTORY, History, ReadBody, ResponsesRequest, WantedHistory, effective_sampling, parse_responses
from .response_state import ResponseState
from .schema import ENCRYPTED_REASONING

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
    """max_bytes: limit of all documents together. Raises OpenAIError naming what does not exist."""
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
    size_bytes = sum(document.history_bytes for document in (*previous, *referred))
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
    found = {id: by_id[id] for id in wanted.item_ids if id in by_id}
    return History(items, found, size_bytes, tuple(document.id for document in previous))


async def _conversation(conversations: Conversations, id: str, max_bytes: int) -> tuple[list[JsonObject], int]:
    """The conversation's items, and the size of their JSON."""
    try:
        document = await conversations.get(id)
    except NotStoredError as error:
        raise not_found(error, _CONVERSATION) from None
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
        because = "" if error.id == id else f": '{error.id}', which it continues, is no longer stored"
        message = f"Previous response with id '{id[:80]}' not found{because}."
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
                document = await store.get_history(current_owner(), "response", id)
                max_bytes -= document.history_bytes
                found.append(document)
        if max_bytes < 0:
            message = "'input' refers to items of responses that are too long to read"
            raise OpenAIError(message, param="input", code="invalid_value")
    return found


def _items(documents: Iterable[Document]) -> Iterable[JsonObject]:
    for document in documents:
        yield from orjson.loads(document.items)
        yield from orjson.loads(document.output) if document.output else orjson.loads(document.body).get("output", ())


def with_ids(items: Iterable[JsonObject], response_id: str) -> list[JsonObject]:
    """Input items in the form in which they are stored and listed."""
    named = partial(item_id, response_id=response_id, side="i")
    return [
        item if item.get("id") else {"id": named(item["type"], index=index), **item} for index, item in enumerate(items)
    ]


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A request after all work that grows with its body."""

    request: ResponsesRequest
    body: JsonObject
    identity_suffix: str
    """The response's id without its prefix."""
    echo: bytes
    """The request's fields that the response repeats, as a JSON object."""
    items: bytes
    """The stored input items, as JSON."""
    history: History

    async def add_to_conversation(
        self, conversations: Conversations | None, owner: str, state: ResponseState, beside: Sequence[Put] = ()
    ) -> bool:
        """Adds input and output to the conversation, if the response has ended normally, and stores `beside` in the
        same transaction. Returns False if it did neither."""
        id = self.request.conversation
        if conversations is not None and id is not None and state.status in ("completed", "incomplete"):
            parts = [part[1:-1] for part in (self.items, state.output_json()) if len(part) > len(b"[]")]
            return await conversations.append_answer(owner, id, b"[" + b",".join(parts) + b"]", beside)
        return False

    def document(
        self,
        owner: str,
        identity: Identity,
        state: ResponseState,
        store: ResponseStore,
        continuation: bytes | None = None,
    ) -> Document:
        """continuation: set for a response in progress"""
        return Document(
            owner=owner,
            kind="response",
            id=identity.id,
            body=state.json(),
            created_s=identity.created_s,
            expires_s=store.expires_s(identity.created_s),
            items=self.items,
            parent=self.request.previous_response_id or "",
            is_live=continuation is not None,
            continuation=continuation or b"",
            output=b"" if continuation is not None else state.output_json(),
        )

    def state(self, identity: Identity, plan: AnswerPlan, key: SealingKey, target: Target) -> ResponseState:
        request = self.request
        sampling = effective_sampling(request.generation.sampling, target.model.sampling_defaults)
        return ResponseState(
            identity,
            plan,
            echo=orjson.dumps(sampling)[:-1] + b"," + self.echo[1:],
            tools=request.tools,
            logprobs=request.generation.logprobs,
            seal=key.seal if ENCRYPTED_REASONING in request.include else None,
            has_messages=request.generation.prompt_form.is_requested,
            is_queued=request.background,
        )


def prepare(read: ReadBody, history: History, key: SealingKey, suffix: str = "") -> PreparedResponse:
    """suffix: the response's id without its prefix; "": a new id"""
    request = parse_responses(read, history, key)
    suffix = suffix or uuid.uuid4().hex
    is_kept = request.store or request.conversation is not None
    items = orjson.dumps(with_ids(request.input_items, ID_PREFIX + suffix)) if is_kept else b"[]"
    return PreparedResponse(request, read.body, suffix, orjson.dumps(request.echo), items, history)
