"""POST /v1/responses/input_tokens: how many tokens a request's prompt has. Nothing is generated or stored.

For: the OpenAI router. Does not know: tokenizers, templates. Invariant: the number is the `usage.input_tokens` of the
response to the same body.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from typing import cast

import orjson
from pydantic import ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.frontends.http.request_body import release_body
from llmbackend.frontends.http.request_scope import unless_disconnected
from llmbackend.frontends.http.routing import post
from llmbackend.frontends.inference_gate import InferenceGate

from ..endpoints import OpenAIEndpoints, json_answer
from ..errors import JsonObject, OpenAIError, missing
from ..generation import check_fields_taken
from ..models import ModelCatalog
from ..prompt_description import describe_prompt
from ..requests import read_body
from ..tensors import RETURN_NUM_INPUT_TOKENS
from .create import ResponseCreation
from .http_types import CompactBody, InputTokens
from .parsing import ReadBody, read_responses
from .schema import ResponsesBody

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
"""Of a create-response request: those that the prompt depends on, and those that OpenAI's clients may send here."""
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

    @post("/v1/responses/compact", body=CompactBody, response_class=Response, status_code=404)
    async def compact(self, http: Request) -> Response:
        """Not supported"""
        body = await read_body(self._gate, http, self._max_body_bytes)
        fields = await self.parsed_body(body, lambda fields: fields)
        if fields.get("model") is None:
            raise missing("model")
        raise OpenAIError("this server compacts no conversations", status=404, code="unsupported")


def _read(body: JsonObject) -> ReadBody:
    if body.get("personality") is not None:
        message = "'personality' is not supported: the instructions say how the model speaks"
        raise OpenAIError(message, param="personality", code="unsupported_parameter")
    for name in body:
        if name not in FIELDS and name != "personality":
            raise OpenAIError(f"unknown field '{name[:80]}'", param=name[:80], code="unknown_parameter")
    return read_responses(body)
