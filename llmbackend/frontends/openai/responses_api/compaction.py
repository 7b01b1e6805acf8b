"""POST /v1/responses/compact: reduces a conversation to the user's messages and a sealed summary that the model writes.

The summary is the answer of a response to the conversation plus one more message, with the limits and the usage of any
other response. Source: OpenAI's API reference.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Final, cast

import orjson
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.tracing.trace import RequestTrace

from ...context import FrontendContext
from ...generation.answer import Identity
from ...generation.http_answers import traced_answer, whole_answer
from ...generation.models import Target
from ...generation.sealed_reasoning import SealingKey
from ...http.errors import JsonObject, OpenAIError, missing
from ...http.request_body import release_body
from ...http.routing import post
from ...operations.probes import load_headers
from ..endpoints import OpenAIEndpoints, check_names
from .create import ResponseCreation, collect
from .output_items import item_id
from .parsing import ReadBody, read_responses
from .preparation import PreparedResponse, with_ids
from .response_state import ResponseState
from .schema import CompactedResponse, ResponsesBody

_INSTRUCTION: Final = (
    "Write a summary of our conversation above, from which you can continue it without having seen it. Keep what was "
    "asked for, what was decided and why, the results of tool calls, every name, number, path and piece of code that "
    "is still needed, and what is left to do. Answer with the summary alone."
)
_FIELDS: Final = frozenset((
    "image", "input", "instructions", "model", "previous_response_id", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "service_tier",
))  # fmt: skip


class CompactBody(ResponsesBody):
    model_config = ConfigDict(
        defer_build=True,
        json_schema_extra=cast(JsonObject, ResponsesBody.model_config["json_schema_extra"])
        | {"propertyNames": {"enum": sorted(_FIELDS)}, "required": ["model"]},
    )
    model: str


class CompactionEndpoints(OpenAIEndpoints):
    def __init__(self, context: FrontendContext, creation: ResponseCreation) -> None:
        super().__init__(context)
        self._creation = creation

    @post("/v1/responses/compact", body=CompactBody, answer=CompactedResponse)
    async def compact(self, http: Request) -> Response:
        """Replace a conversation's answers by a summary"""
        start_ns = time.monotonic_ns()
        self._gate.check_capacity()
        prepared = await self._creation.prepared(await self.body_of(http), _read)
        answer = partial(self._answer, http, prepared)
        return await traced_answer(self._gate, self._catalog, http, start_ns, prepared.request.generation, answer)

    async def _answer(
        self, http: Request, prepared: PreparedResponse, target: Target, trace: RequestTrace | None
    ) -> Response:
        identity, state, generation = self._creation.begin(prepared, target, trace)
        release_body(http)

        async def compacted() -> bytes:
            await collect(generation, state)
            return await generation.in_thread(partial(_body, prepared, identity, state, self._key))

        headers = partial(load_headers, self._gate.server, http, target.name)
        return await whole_answer(http, generation, compacted(), headers)


def _read(body: JsonObject) -> ReadBody:
    """Reads the body like that of a response whose last message asks for the summary."""
    check_names(body, _FIELDS, "field")
    if body.get("model") is None:
        raise missing("model")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not items and body.get("previous_response_id") is None:
        raise missing("input")
    if not isinstance(items, list | None):
        return read_responses(body)  # refuses it
    asked = {"type": "message", "role": "user", "content": _INSTRUCTION}
    return read_responses(body | {"input": [*(items or ()), asked], "store": False})


def _body(prepared: PreparedResponse, identity: Identity, state: ResponseState, key: SealingKey) -> bytes:
    """Raises OpenAIError if the model did not write a complete summary."""
    texts = [part["text"] for item in state.output() if item["type"] == "message" for part in item["content"]]
    if state.status != "completed" or not (summary := "".join(texts).strip()):
        message = "the model did not complete a summary within its context: send a shorter conversation"
        raise OpenAIError(message, status=500, code="server_error")
    items = (*prepared.history.items, *prepared.request.input_items[:-1])
    asked = [item for item in items if item["type"] == "message" and item["role"] == "user"]
    output = with_ids(asked, identity.id)
    sealed = {"id": item_id("compaction", identity.id, "o", len(output)), "type": "compaction"}
    body = {
        "id": identity.id,
        "object": "response.compaction",
        "created_at": identity.created_s,
        "output": [*output, sealed | {"encrypted_content": key.seal(summary)}],
        "usage": state.usage(),
    }
    return orjson.dumps(body)
