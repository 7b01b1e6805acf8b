"""POST /v1/responses: a response, whole or streamed, which is stored where the request asks for it.

For: the OpenAI router. Does not know: any backend, how a store keeps what it gets. Invariant: one request path: a
response is read from the same generation and answer plan as a chat. A stored response can be retrieved as soon as its
client has its end.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.tracing.trace import RequestTrace
from llmbackend.frontends.http.request_body import release_body
from llmbackend.frontends.http.routing import post
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.documents import Document
from llmbackend.frontends.journals.response_store import ResponseStore, current_owner
from llmbackend.frontends.journals.resumable_http import refuse_resuming
from llmbackend.frontends.operations.probes import load_headers

from ..answer_plan import AnswerPlan, plan_answer
from ..answering import streamed_answer, traced_answer, whole_answer
from ..endpoints import OpenAIEndpoints
from ..errors import JsonObject, OpenAIError
from ..generation import Generation
from ..models import ModelCatalog, Target
from ..requests import decode_cost
from ..responses import Identity
from ..sealed_reasoning import FIXED_KEY, SealingKey
from .conversations import Conversations
from .event_writer import ResponseWriter
from .http_types import ResponseObject
from .output_items import ID_PREFIX
from .parsing import ReadBody, effective_sampling, parse_responses, read_responses
from .request import History, ResponsesRequest
from .response_state import ResponseState
from .schema import ResponsesBody
from .stored_history import fetch_history, with_ids

_MAX_HISTORY_BYTES = 8 << 20
"""Of the stored responses that a request goes on behind: twice the largest body by default."""


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """A request whose work in proportion to its body has been done."""

    request: ResponsesRequest
    body: JsonObject
    identity_suffix: str
    """Drawn: what the response's id has behind its prefix."""
    echo: bytes
    """JSON of what the response repeats of its request."""
    items: bytes
    """JSON of the input items as they are stored."""
    history: History
    """What it goes on from."""

    @property
    def id(self) -> str:
        return ID_PREFIX + self.identity_suffix

    async def tell_conversation(self, conversations: Conversations | None, owner: str, state: ResponseState) -> None:
        """Adds what was asked and answered to the conversation that the response belongs to, if it has an end."""
        id = self.request.conversation
        if conversations is not None and id is not None and state.status in ("completed", "incomplete"):
            answered = orjson.dumps(state.output())
            parts = [part[1:-1] for part in (self.items, answered) if len(part) > len(b"[]")]
            await conversations.append_answer(owner, id, b"[" + b",".join(parts) + b"]")

    def state(self, identity: Identity, plan: AnswerPlan | None, key: SealingKey, target: Target) -> ResponseState:
        request = self.request
        sampling = effective_sampling(request.generation.sampling, target.model.sampling_defaults)
        return ResponseState(
            identity,
            plan,
            echo=orjson.dumps(sampling)[:-1] + b"," + self.echo[1:],
            tools=request.tools,
            logprobs=request.generation.logprobs,
            seal=key.seal if request.includes_encrypted_reasoning else None,
            is_queued=request.background,
        )


class Background(Protocol):
    """Makes responses without their clients."""

    async def create(
        self, http: Request, prepared: PreparedResponse, target: Target, trace: RequestTrace | None
    ) -> Response: ...


class ResponseCreation(OpenAIEndpoints):
    """The endpoint."""

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
        """store, conversations: None: no response is kept
        key: seals reasoning that clients send back
        """
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
        streams="The whole response, or with `stream` its events, the last of which holds it.",
    )
    async def create(self, http: Request) -> Response:
        """Answer a conversation, with items"""
        start_ns = time.monotonic_ns()
        refuse_resuming(http, "one with 'background': true is read on by its starting_after")
        self._gate.check_room()
        prepared = await self.prepared(await self.body_of(http))
        answer = partial(self._answer, http, prepared)
        return await traced_answer(self._gate, self._catalog, http, start_ns, prepared.request.generation, answer)

    async def prepared(self, body: bytes, read: Callable[[JsonObject], ReadBody] = read_responses) -> PreparedResponse:
        """read: checks the fields of the body"""
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
                message = "'background' is not supported: this server keeps no responses"
                raise OpenAIError(message, param="background", code="unsupported_parameter")
            return await self._background.create(http, prepared, target, trace)
        asked = prepared.request.generation
        identity = Identity.of(asked, target.model.fingerprint, prepared.identity_suffix)
        plan = plan_answer(asked, target)
        state = prepared.state(identity, plan, self._key, target)
        generation = Generation(self._gate, asked, target, identity.id, plan=plan, trace=trace)
        release_body(http)
        keep = self._keeper(prepared, identity, state)
        headers = partial(load_headers, self._gate.server, http, target.name)
        if asked.stream is None:
            return await whole_answer(http, generation, _whole(generation, state, keep), headers)
        return await streamed_answer(http, generation, ResponseWriter(state), headers, keep)

    def _keeper(self, prepared: PreparedResponse, identity: Identity, state: ResponseState) -> Keep | None:
        """Puts the response into the store and into its conversation; None where it is not to be kept."""
        store, request = self._store, prepared.request
        if store is None or not (request.store or request.conversation):
            return None
        owner = current_owner()

        async def keep() -> None:
            await prepared.tell_conversation(self._conversations, owner, state)
            if not request.store:
                return
            await store.put(
                Document(
                    owner=owner,
                    kind="response",
                    id=identity.id,
                    body=state.json(),
                    created_s=identity.created_s,
                    expires_s=store.expires_s(identity.created_s),
                    items=prepared.items,
                    parent=request.previous_response_id or "",
                )
            )

        return keep


Keep = Callable[[], Coroutine[Any, Any, None]]
_HISTORY_ITEM_COST = 256
"""As how many bytes of a body an item of the history counts: see `decode_cost`."""


def prepare(read: ReadBody, history: History, key: SealingKey, suffix: str = "") -> PreparedResponse:
    """suffix: of the response's id; "": drawn"""
    request = parse_responses(read, history, key)
    suffix = suffix or uuid.uuid4().hex
    is_kept = request.store or request.conversation is not None
    items = orjson.dumps(with_ids(request.input_items, ID_PREFIX + suffix)) if is_kept else b"[]"
    return PreparedResponse(request, read.body, suffix, orjson.dumps(request.echo), items, history)


async def _whole(generation: Generation, state: ResponseState, keep: Keep | None) -> bytes:
    """The response, once it is over. Raises OpenAIError where its generation failed."""
    while not generation.is_over:
        _, delta = await generation.next()
        state.add(delta)
    state.end()
    if keep is not None:
        await keep()
    return state.json()
