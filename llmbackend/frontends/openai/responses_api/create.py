"""POST /v1/responses, and /v1/responses/input_tokens.

Invariants: a response has the same generation and answer plan as a chat; a stored response can be retrieved once its
client has its end; only its owner can continue it; /v1/responses/input_tokens returns the `usage.input_tokens` of a
response to the same body; documents are parsed off the event loop. Source: OpenAI's API reference.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import orjson
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.tracing.trace import RequestTrace

from ...generation.answer import Identity
from ...generation.http_answers import streamed_answer, traced_answer, whole_answer
from ...generation.inferences import Generation, check_fields_taken, describe_prompt
from ...generation.models import ModelCatalog, Target
from ...generation.plan import AnswerPlan, plan_answer
from ...generation.sealed_reasoning import FIXED_KEY, SealingKey
from ...generation.tensors import RETURN_NUM_INPUT_TOKENS
from ...http.errors import JsonObject, OpenAIError
from ...http.request_body import release_body
from ...http.request_scope import unless_disconnected
from ...http.routing import post
from ...inference_gate import InferenceGate
from ...journals.documents import Document
from ...journals.response_store import (
    LineageTooLongError,
    NotStoredError,
    ResponseStore,
    current_owner,
)
from ...journals.resumable_streams import refuse_resuming
from ...operations.probes import load_headers
from ..endpoints import OpenAIEndpoints, decode_cost, json_answer
from .conversations import Conversations
from .events import ResponseWriter
from .output_items import ID_PREFIX, item_id, response_of
from .parsing import (
    NO_HISTORY,
    History,
    ReadBody,
    ResponsesRequest,
    WantedHistory,
    effective_sampling,
    parse_responses,
    read_responses,
)
from .response_state import ResponseState
from .schema import ENCRYPTED_REASONING, InputTokens, ResponseObject, ResponsesBody

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
    """max_bytes: of all documents. Raises OpenAIError naming what does not exist."""
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


_MAX_HISTORY_BYTES = 8 << 20
"""Of the stored responses that a request continues: twice the largest body by default."""


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A request after all work in proportion to its body."""

    request: ResponsesRequest
    body: JsonObject
    identity_suffix: str
    """Of the response's id, after its prefix."""
    echo: bytes
    """JSON object of the request's fields in the response."""
    items: bytes
    """JSON of the stored input items."""
    history: History

    @property
    def id(self) -> str:
        return ID_PREFIX + self.identity_suffix

    async def tell_conversation(self, conversations: Conversations | None, owner: str, state: ResponseState) -> None:
        """Adds input and output to the response's conversation, if it has ended normally."""
        id = self.request.conversation
        if conversations is not None and id is not None and state.status in ("completed", "incomplete"):
            answered = orjson.dumps(state.output())
            parts = [part[1:-1] for part in (self.items, answered) if len(part) > len(b"[]")]
            await conversations.append_answer(owner, id, b"[" + b",".join(parts) + b"]")

    def document(
        self,
        owner: str,
        identity: Identity,
        state: ResponseState,
        store: ResponseStore,
        continuation: bytes | None = None,
    ) -> Document:
        """continuation: of a live response"""
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
            has_messages=request.generation.prompt_form.is_asked,
            is_queued=request.background,
        )


class Background(Protocol):
    """Generates responses without their clients."""

    async def create(
        self, http: Request, prepared: PreparedResponse, target: Target, trace: RequestTrace | None
    ) -> Response: ...


class ResponseCreation(OpenAIEndpoints):
    def __init__(
        self,
        gate: InferenceGate,
        catalog: ModelCatalog,
        max_body_bytes: int,
        store: ResponseStore | None = None,
        conversations: Conversations | None = None,
        key: SealingKey = FIXED_KEY,
        background: Background | None = None,
    ) -> None:
        """store, conversations: None: nothing is stored. key: seals reasoning."""
        super().__init__(gate, max_body_bytes)
        self._catalog = catalog
        self._store = store
        self._conversations = conversations
        self._key = key
        self._background = background

    @post(
        "/v1/responses",
        body=ResponsesBody,
        answer=ResponseObject,
        streams="The whole response, or its events with `stream`; the last event contains the whole response.",
    )
    async def create(self, http: Request) -> Response:
        """Answer a conversation, with items"""
        start_ns = time.monotonic_ns()
        refuse_resuming(http, "with 'background': true, read on with starting_after")
        self._gate.check_room()
        prepared = await self.prepared(await self.body_of(http))
        answer = partial(self._answer, http, prepared)
        return await traced_answer(self._gate, self._catalog, http, start_ns, prepared.request.generation, answer)

    async def prepared(self, body: bytes, read: Callable[[JsonObject], ReadBody] = read_responses) -> PreparedResponse:
        cost = decode_cost(body)
        fields = await self.parsed_body(body, read)
        history = await fetch_history(self._store, self._conversations, fields.wanted, self._gate, _MAX_HISTORY_BYTES)
        cost += history.size_bytes + _HISTORY_ITEM_COST * len(history.items)
        prepared = await self._gate.decode_in_thread(cost, partial(prepare, fields, history, self._key))
        asked = prepared.request.generation
        if asked.model:
            return prepared
        request = dataclasses.replace(prepared.request, generation=self._catalog.with_model(asked))
        return dataclasses.replace(prepared, request=request)

    async def _answer(
        self, http: Request, prepared: PreparedResponse, target: Target, trace: RequestTrace | None
    ) -> Response:
        if prepared.request.background:
            if self._background is None:
                message = "'background' is not supported: this server stores no responses"
                raise OpenAIError(message, param="background", code="unsupported_parameter")
            return await self._background.create(http, prepared, target, trace)
        identity, state, generation = self.begin(prepared, target, trace)
        release_body(http)
        keep = self._keeper(prepared, identity, state)
        headers = partial(load_headers, self._gate.server, http, target.name)
        if prepared.request.generation.stream is None:
            return await whole_answer(http, generation, _whole(generation, state, keep), headers)
        return await streamed_answer(http, generation, ResponseWriter(state), headers, keep)

    def begin(
        self, prepared: PreparedResponse, target: Target, trace: RequestTrace | None
    ) -> tuple[Identity, ResponseState, Generation]:
        """Raises OpenAIError."""
        asked = prepared.request.generation
        identity = Identity.of(asked, target.model.fingerprint, prepared.identity_suffix)
        plan = plan_answer(asked, target)
        state = prepared.state(identity, plan, self._key, target)
        return identity, state, Generation(self._gate, asked, target, identity.id, plan=plan, trace=trace)

    def _keeper(self, prepared: PreparedResponse, identity: Identity, state: ResponseState) -> Keep | None:
        """Stores the response and adds it to its conversation; None if neither is asked for."""
        store, request = self._store, prepared.request
        if store is None or not (request.store or request.conversation):
            return None
        owner = current_owner()

        async def keep() -> None:
            await prepared.tell_conversation(self._conversations, owner, state)
            if request.store:
                await store.put(prepared.document(owner, identity, state, store))

        return keep


Keep = Callable[[], Coroutine[Any, Any, None]]
_HISTORY_ITEM_COST = 256
"""Of an item of the history, in bytes of a body: see `decode_cost`."""


def prepare(read: ReadBody, history: History, key: SealingKey, suffix: str = "") -> PreparedResponse:
    """suffix: of the response's id; "": a new one"""
    request = parse_responses(read, history, key)
    suffix = suffix or uuid.uuid4().hex
    is_kept = request.store or request.conversation is not None
    items = orjson.dumps(with_ids(request.input_items, ID_PREFIX + suffix)) if is_kept else b"[]"
    return PreparedResponse(request, read.body, suffix, orjson.dumps(request.echo), items, history)


async def collect(generation: Generation, state: ResponseState) -> None:
    """Adds the whole answer. Raises OpenAIError if the generation failed."""
    while not generation.is_over:
        _, delta = await generation.next()
        if delta.prompt is None:
            state.add(delta)
        else:
            await generation.in_thread(partial(state.add, delta))
    state.end()


async def _whole(generation: Generation, state: ResponseState, keep: Keep | None) -> bytes:
    await collect(generation, state)
    if keep is not None:
        await keep()
    return state.json()


FIELDS = frozenset(
    (
        "conversation",
        "input",
        "instructions",
        "model",
        "parallel_tool_calls",
        "previous_response_id",
        "reasoning",
        "text",
        "tool_choice",
        "tools",
        "truncation",
        "chat_template_kwargs",
    )
)
"""Those that the prompt depends on, and others that OpenAI's clients may send."""
_PROMPT_SAMPLING = ("truncate_prompt_tokens", "add_special_tokens")


class InputTokensBody(ResponsesBody):
    model_config = ConfigDict(
        defer_build=True,
        json_schema_extra=cast(JsonObject, ResponsesBody.model_config["json_schema_extra"])
        | {"propertyNames": {"enum": sorted(FIELDS)}},
    )


class InputTokenEndpoints(OpenAIEndpoints):
    def __init__(
        self, gate: InferenceGate, catalog: ModelCatalog, creation: ResponseCreation, max_body_bytes: int
    ) -> None:
        super().__init__(gate, max_body_bytes)
        self._catalog = catalog
        self._creation = creation

    @post("/v1/responses/input_tokens", body=InputTokensBody, answer=InputTokens)
    async def count(self, http: Request) -> Response:
        """The number of tokens of a prompt"""
        self._gate.check_room()
        body = await self.body_of(http)
        request = (await self._creation.prepared(body, _read)).request.generation
        target = self._catalog.require(request.model, request.prompts[0].name)
        check_fields_taken(request, target)
        release_body(http)
        sampling = {name: value for name, value in request.sampling.items() if name in _PROMPT_SAMPLING}
        (prompt,) = request.prompts
        work = describe_prompt(self._gate, target, prompt, (RETURN_NUM_INPUT_TOKENS,), sampling=sampling)
        try:
            found = await unless_disconnected(http, work)
        except OpenAIError as error:
            raise request.in_own_fields(error) from None
        counted = {"object": "response.input_tokens", "input_tokens": found.num_tokens}
        return json_answer(orjson.dumps(counted))


def _read(body: JsonObject) -> ReadBody:
    if body.get("personality") is not None:
        message = "'personality' is not supported: use the instructions"
        raise OpenAIError(message, param="personality", code="unsupported_parameter")
    check_names(body, FIELDS | {"personality"})
    return read_responses(body)


def check_names(body: JsonObject, known: frozenset[str]) -> None:
    """Raises OpenAIError for a field that is not one of `known`."""
    for name in body:
        if name not in known:
            raise OpenAIError(f"unknown field '{name[:80]}'", param=name[:80], code="unknown_parameter")
