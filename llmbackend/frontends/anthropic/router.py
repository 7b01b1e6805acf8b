"""The endpoints of Anthropic's API: messages, token counting, models.

Invariants: answers and errors under /v1/messages have Anthropic's format and a `request-id`; a client disconnect
cancels its request; models have the same names as in the OpenAI API. Source: Anthropic's API reference.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from datetime import UTC, datetime
from functools import partial
from typing import Final

import orjson
from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from llmbackend.core.tracing.trace import RequestTrace

from ..context import FrontendContext
from ..generation.answer import Identity
from ..generation.http_answers import logged, streamed_answer, traced_answer, whole_answer
from ..generation.inferences import Generation, describe_prompt
from ..generation.models import Target
from ..generation.plan import plan_answer
from ..generation.tensors import RETURN_NUM_INPUT_TOKENS
from ..http.errors import AnthropicErrorBody, JsonObject, OpenAIError, as_json, refuse
from ..http.request_body import release_body
from ..http.request_scope import LABELS, unless_disconnected
from ..http.routing import CatchAll, post, whole_number
from ..journals.resumable_streams import refuse_resuming
from ..openai.endpoints import OpenAIEndpoints
from ..operations.probes import load_headers
from .answers import REQUEST_ID, AnthropicMessage, MessageWriter, TokenCount, error_response, whole_message
from .content import BetaFields
from .requests import MessageRequest, parse_message, parse_prompt
from .schema import CountTokensRequest, MessagesRequest

_DEFAULT_LIMIT: Final = 20
_MOST: Final = 1000


def model_info(model: JsonObject) -> JsonObject:
    """model: in the format of OpenAI's API"""
    length = model["max_model_len"]
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": datetime.fromtimestamp(model["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


def model_page(request: Request, models: list[JsonObject]) -> JsonObject:
    """The requested page of `models`. Raises OpenAIError."""
    infos = [model_info(model) for model in models]
    ids = [info["id"] for info in infos]
    limit = _limit(request.query_params.get("limit"))
    first, end = 0, len(infos)
    if (after := request.query_params.get("after_id")) is not None:
        first = _position(ids, after, "after_id") + 1
    if (before := request.query_params.get("before_id")) is not None:
        end = _position(ids, before, "before_id")
        first = max(first, end - limit)
    page = infos[first:end][:limit]
    is_more = first > 0 if before is not None else first + len(page) < end
    return {
        "data": page,
        "has_more": is_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if (limit := whole_number(text, 1, _MOST)) is None:
        raise refuse("limit", f"an integer from 1 to {_MOST}", text)
    return limit


def _position(ids: list[str], id: str, param: str) -> int:
    if id not in ids:
        raise refuse(param, "the id of a model", id)
    return ids.index(id)


VERSION: Final = "anthropic-version"
_VERSIONS: Final = ("2023-06-01", "2026-10-21")
"""The later version does not accept `temperature`, `top_k` and `top_p` at Anthropic; here they have an effect."""
_ID: Final = "llmbackend.anthropic_request_id"
"""Key in the ASGI scope."""


def create_anthropic_router(context: FrontendContext) -> APIRouter:
    """/v1/messages, and /v1/models for clients that send `anthropic-version`. Must precede the OpenAI router."""
    api = AnthropicEndpoints(context)
    router = APIRouter()
    api.add_to(router)
    for path, endpoint in (("/v1/models", api.models), ("/v1/models/{model:path}", api.model)):
        router.routes.append(_AnthropicClientsRoute(path, partial(api.answer, endpoint=endpoint), methods=["GET"]))
    for path in ("/v1/messages", "/v1/messages/{path:path}"):
        router.routes.append(Route(path, CatchAll(api, _refuse)))
    return router


class _AnthropicClientsRoute(Route):
    """A path of both APIs; matches only Anthropic's clients, which send their API version."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if VERSION in Headers(scope=scope) else (Match.NONE, {})


class AnthropicEndpoints(OpenAIEndpoints):
    error = AnthropicErrorBody
    statuses = (400, 404, 413, 415, 429, 529)
    answers_head = False

    def check(self, http: Request) -> None:
        """Refuses unknown versions. A missing version is accepted, since many tools send none."""
        version = http.headers.get(VERSION)
        if version is not None and version not in _VERSIONS:
            message = f"header '{VERSION}' is {as_json(version)}, expected {' or '.join(_VERSIONS)}"
            raise OpenAIError(message, param=VERSION, code="invalid_value")

    def refusal(self, http: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return super().refusal(http, error)
        return error_response(OpenAIError.of(error), _id_of(http))

    async def models(self, http: Request) -> Response:
        return _json(model_page(http, (await self._catalog.list())["data"]), http)

    async def model(self, http: Request) -> Response:
        return _json(model_info(await self._catalog.get(http.path_params["model"])), http)

    @post(
        "/v1/messages",
        body=MessagesRequest,
        answer=AnthropicMessage,
        streams="The whole message, or its events with `stream`.",
    )
    async def messages(self, http: Request) -> Response:
        """Answer a conversation (Anthropic's API)"""
        start_ns = time.monotonic_ns()
        refuse_resuming(http)
        self._gate.check_capacity()
        beta = BetaFields(http.headers.get("anthropic-beta", ""))
        request = await self.parsed(http, lambda body: parse_message(body, beta, self._key))
        labels = _log_labels(request.generation.labels, beta)
        asked = dataclasses.replace(request.generation, labels=labels)
        answer = partial(self._answer, http, request)
        return await traced_answer(self._gate, self._catalog, http, start_ns, asked, answer)

    async def _answer(
        self, http: Request, request: MessageRequest, target: Target, trace: RequestTrace | None
    ) -> Response:
        request, request_id = _without_unused_budget(request, target), _id_of(http)
        asked = request.generation
        identity = Identity.of(asked, target.model.fingerprint, request_id.removeprefix("req_"))
        plan = plan_answer(asked, target)
        generation = Generation(self._gate, asked, target, identity.id, plan=plan, trace=trace)
        release_body(http)
        headers = partial(self._headers, http, target)
        if asked.stream is None:
            work = whole_message(generation, request, identity, plan, self._key)
            return await whole_answer(http, generation, work, headers)
        writer = MessageWriter(request, identity, plan, self._key, request_id)
        quiet_s = self._context.options.request_defaults.sse_keep_alive_s
        return await streamed_answer(http, generation, writer, headers, quiet_s=quiet_s)

    def _headers(self, http: Request, target: Target) -> dict[str, str]:
        return load_headers(self._gate.server, http, target.name) | {REQUEST_ID: _id_of(http)}

    @post("/v1/messages/count_tokens", body=CountTokensRequest, answer=TokenCount)
    async def count_tokens(self, http: Request) -> Response:
        """Count the tokens of a conversation (Anthropic's API)"""
        self._gate.check_capacity()
        beta = BetaFields(http.headers.get("anthropic-beta", ""))
        request = await self.parsed(http, lambda body: parse_prompt(body, beta, self._key))
        if labels := _log_labels({}, beta):
            http.scope[LABELS] = logged(labels)
        prompt = request.prompts[0]
        target = await self._catalog.require(request.model, prompt.name)
        plan_answer(request, target)
        release_body(http)
        try:
            asked = describe_prompt(self._gate, target, prompt, (RETURN_NUM_INPUT_TOKENS,), request_id=_id_of(http))
            described = await unless_disconnected(http, asked)
        except OpenAIError as error:
            raise request.in_client_fields(error) from None
        return _json({"input_tokens": described.num_tokens}, http)


def _without_unused_budget(request: MessageRequest, target: Target) -> MessageRequest:
    """Drops the reasoning budget for a model that does not reason: agents send one to every model."""
    asked = request.generation
    if asked.reasoning.budget_tokens is None or target.model.formats.reasoning is not None:
        return request
    reasoning = dataclasses.replace(asked.reasoning, budget_tokens=None)
    return dataclasses.replace(request, generation=dataclasses.replace(asked, reasoning=reasoning))


def _log_labels(labels: JsonObject, beta: BetaFields) -> JsonObject:
    """Labels for the access log: the client's own, and ignored fields."""
    beta.write_log()
    return labels | ({"passed_over": ",".join(beta.passed_over)} if beta.passed_over else {})


def _id_of(http: Request) -> str:
    """The id for the response header `request-id`."""
    id: str = http.scope.setdefault(_ID, "") or f"req_{uuid.uuid4().hex}"
    http.scope[_ID] = id
    return id


async def _refuse(http: Request) -> Response:
    path = http.url.path
    if path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = error_response(OpenAIError(f"{http.method} is not allowed on {path}", status=405), _id_of(http))
        response.headers["Allow"] = "POST"
        return response
    if path.startswith("/v1/messages/batches"):
        raise OpenAIError("batches are not supported: this server stores no requests", status=404)
    raise OpenAIError(f"unknown URL: {http.method} {path}", status=404)


def _json(value: JsonObject, http: Request) -> Response:
    return Response(orjson.dumps(value), headers={REQUEST_ID: _id_of(http)}, media_type="application/json")
