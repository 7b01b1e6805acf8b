"""POST /v1/responses, and /v1/responses/input_tokens.

Invariants: a response has the same generation and answer plan as a chat; a stored response can be retrieved as soon as
its client has received its end; /v1/responses/input_tokens returns the `usage.input_tokens` of a response to the same
body, if nothing is truncated. Source: OpenAI's API reference.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

import orjson
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.tracing.trace import RequestTrace

from ...context import FrontendContext
from ...generation.answer import Identity
from ...generation.http_answers import streamed_answer, traced_answer, whole_answer
from ...generation.inferences import Generation, check_fields, describe_prompt
from ...generation.models import Target
from ...generation.plan import plan_answer
from ...generation.tensors import RETURN_NUM_INPUT_TOKENS
from ...http.errors import JsonObject, OpenAIError
from ...http.request_body import release_body
from ...http.request_scope import unless_disconnected
from ...http.routing import post
from ...journals.documents import Put
from ...journals.response_store import current_owner
from ...journals.resumable_streams import refuse_resuming
from ...operations.probes import load_headers
from ..endpoints import OpenAIEndpoints, check_names, decode_cost, json_answer
from .background import BackgroundResponses
from .conversations import Conversations
from .events import ResponseWriter
from .parsing import ReadBody, read_responses
from .preparation import PreparedResponse, fetch_history, prepare
from .response_state import ResponseState
from .schema import InputTokens, ResponseObject, ResponsesBody

_MAX_HISTORY_BYTES = 8 << 20
"""Limit of the stored responses that a request continues: twice the largest body by default."""
_HISTORY_ITEM_COST = 256
"""How many bytes of a body an item of the history counts as: see `decode_cost`."""
Keep = Callable[[], Coroutine[Any, Any, None]]
_FIELDS = frozenset((
    "conversation", "input", "instructions", "model", "parallel_tool_calls", "personality", "previous_response_id",
    "reasoning", "text", "tool_choice", "tools", "truncation", "chat_template_kwargs",
))  # fmt: skip
"""The fields that determine the prompt, and others that OpenAI's clients may send."""


class InputTokensBody(ResponsesBody):
    model_config = ConfigDict(
        defer_build=True,
        json_schema_extra=cast(JsonObject, ResponsesBody.model_config["json_schema_extra"])
        | {"propertyNames": {"enum": sorted(_FIELDS)}},
    )


class ResponseCreation(OpenAIEndpoints):
    def __init__(self, context: FrontendContext) -> None:
        super().__init__(context)
        store = context.store
        self._conversations = None if store is None else Conversations(store, self._gate, self._max_body_bytes)
        self.background = None if store is None else BackgroundResponses(context, store)

    @post(
        "/v1/responses",
        body=ResponsesBody,
        answer=ResponseObject,
        streams="The whole response, or its events with `stream`; the last event contains the whole response.",
    )
    async def create(self, http: Request) -> Response:
        """Answer a conversation given as items"""
        start_ns = time.monotonic_ns()
        refuse_resuming(http, "with 'background': true, read on with starting_after")
        self._gate.check_capacity()
        prepared = await self.prepared(await self.body_of(http))
        answer = partial(self._answer, http, prepared)
        return await traced_answer(self._gate, self._catalog, http, start_ns, prepared.request.generation, answer)

    async def prepared(self, body: bytes, read: Callable[[JsonObject], ReadBody] = read_responses) -> PreparedResponse:
        cost = decode_cost(body)
        fields = await self.parsed_body(body, read)
        history = await fetch_history(
            self._context.store, self._conversations, fields.wanted, self._gate, _MAX_HISTORY_BYTES
        )
        cost += history.size_bytes + _HISTORY_ITEM_COST * len(history.items)
        prepared = await self._gate.decode_in_thread(cost, partial(prepare, fields, history, self._key))
        asked = prepared.request.generation
        if asked.model:
            return prepared
        request = dataclasses.replace(prepared.request, generation=await self._catalog.with_model(asked))
        return dataclasses.replace(prepared, request=request)

    async def _answer(
        self, http: Request, prepared: PreparedResponse, target: Target, trace: RequestTrace | None
    ) -> Response:
        if prepared.request.background:
            if self.background is None:
                message = "'background' is not supported: this server stores no responses"
                raise OpenAIError(message, param="background", code="unsupported_parameter")
            return await self.background.create(http, prepared, target, trace)
        identity, state, generation = self.begin(prepared, target, trace)
        release_body(http)
        keep = self._keeper(prepared, identity, state)
        headers = partial(load_headers, self._gate.server, http, target.name)
        if prepared.request.generation.stream is None:
            return await whole_answer(http, generation, _whole(generation, state, keep), headers)
        quiet_s = self._context.options.request_defaults.sse_keep_alive_s
        return await streamed_answer(http, generation, ResponseWriter(state), headers, keep, quiet_s=quiet_s)

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
        """Stores the response and adds it to its conversation; None if neither is requested."""
        store, request = self._context.store, prepared.request
        if store is None or not (request.store or request.conversation):
            return None
        owner = current_owner()

        async def keep() -> None:
            stored: list[Put] = []
            if request.store:
                stored.append(Put(prepared.document(owner, identity, state, store), prepared.history.ancestors))
            if not await prepared.add_to_conversation(self._conversations, owner, state, stored) and stored:
                await store.put_all(stored)

        return keep

    @post("/v1/responses/input_tokens", body=InputTokensBody, answer=InputTokens)
    async def count(self, http: Request) -> Response:
        """Count the tokens of a prompt"""
        self._gate.check_capacity()
        body = await self.body_of(http)
        request = (await self.prepared(body, _read)).request.generation
        target = await self._catalog.require(request.model, request.prompts[0].name)
        check_fields(request, target)
        release_body(http)
        (prompt,) = request.prompts
        # Without sampling parameters: `truncation` must not cut the prompt.
        work = describe_prompt(self._gate, target, prompt, (RETURN_NUM_INPUT_TOKENS,))
        try:
            found = await unless_disconnected(http, work)
        except OpenAIError as error:
            raise request.in_client_fields(error) from None
        counted = {"object": "response.input_tokens", "input_tokens": found.num_tokens}
        return json_answer(orjson.dumps(counted))


async def collect(generation: Generation, state: ResponseState) -> None:
    """Adds the whole answer. Raises OpenAIError if the generation failed."""
    while not generation.is_over:
        _, delta = await generation.next()
        num_tokens = delta.num_listed_tokens + sum(map(len, delta.logprobs))
        await generation.in_thread_if_long(num_tokens, partial(state.add, delta))
    state.end()


async def _whole(generation: Generation, state: ResponseState, keep: Keep | None) -> bytes:
    await collect(generation, state)
    body = await generation.in_thread_if_long(generation.num_logprobs, state.json)
    if keep is not None:
        await keep()
    return body


def _read(body: JsonObject) -> ReadBody:
    check_names(body, _FIELDS, "field")
    return read_responses(body)
