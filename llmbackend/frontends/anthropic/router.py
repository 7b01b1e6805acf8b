"""The endpoints of Anthropic's API: messages, the count of their tokens, models.

For: the HTTP application, before the OpenAI router, which answers every other path under /v1. Does not know: any
backend. Invariant: every path under /v1/messages answers in Anthropic's shapes, errors included, each with a
`request-id`, and no request outlives its client. A request takes the OpenAI frontend's path: GenerationRequest, answer
plan, Generation, AnswerReader.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import orjson
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llmbackend.core.host_protocol import Host
from llmbackend.core.tracing.trace import RequestTrace

from ..http.client_disconnect import unless_disconnected
from ..http.request_body import release_body
from ..http.request_scope import LABELS
from ..inference_gate import InferenceGate
from ..journals.resumable_http import refuse_resuming
from ..openai.answer_plan import plan_answer
from ..openai.answering import streamed_answer, traced_answer, whole_answer
from ..openai.errors import JsonObject, OpenAIError, as_json
from ..openai.generation import Generation
from ..openai.labels import logged
from ..openai.models import ModelCatalog, Target
from ..openai.prompt_description import describe_prompt
from ..openai.requests import check_content_type, decode_cost, json_object, read_body
from ..openai.responses import Identity
from ..openai.router import DEFAULT_MAX_BODY_BYTES, model_endpoints
from ..openai.sealed_reasoning import FIXED_KEY, SealingKey
from ..openai.tensors import RETURN_NUM_INPUT_TOKENS
from ..operations.metrics import load_headers
from .answers import MessageWriter, whole_message
from .beta import BetaFields
from .errors import REQUEST_ID, error_response
from .models import model_info, model_page
from .requests import MessageRequest, parse_message, parse_prompt

VERSION: Final = "anthropic-version"
_VERSIONS: Final = ("2023-06-01", "2026-10-21")
"""The later one takes no `temperature`, `top_k` and `top_p` at Anthropic, whose models lost them. These have them."""
_CLIENT_CLOSED_REQUEST: Final = 499
_Handler = Callable[[Request], Awaitable[Response]]
Endpoint = Callable[[Request, str], Awaitable[Response]]
"""Gets the request and the id that its response has."""


def create_anthropic_router(
    server: Host,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    gate: InferenceGate | None = None,
    lora_separator: str = "",
    sealing_key: SealingKey = FIXED_KEY,
) -> APIRouter:
    """A router of /v1/messages, and of /v1/models for clients that send `anthropic-version`. To be included before the
    OpenAI router. `gate` is the one that other frontends of `server` use."""
    service = _AnthropicService(gate or InferenceGate(server), max_body_bytes, lora_separator, sealing_key)
    router = APIRouter()
    router.add_route("/v1/messages", _guarded(service.messages), methods=["POST"])
    router.add_route("/v1/messages/count_tokens", _guarded(service.count_tokens), methods=["POST"])
    every, one = model_endpoints(service.catalog)
    router.add_route("/v1/models", _by_client(_guarded(service.models), every), methods=["GET"])
    router.add_route("/v1/models/{model:path}", _by_client(_guarded(service.model), one), methods=["GET"])
    router.routes.append(Route("/v1/messages", _UnknownPath()))
    router.routes.append(Route("/v1/messages/{path:path}", _UnknownPath()))
    return router


class _AnthropicService:
    def __init__(self, gate: InferenceGate, max_body_bytes: int, lora_separator: str, key: SealingKey) -> None:
        self._gate = gate
        self.catalog = ModelCatalog(gate.server, lora_separator)
        self._max_body_bytes = max_body_bytes
        self._key = key

    async def models(self, http: Request, request_id: str) -> Response:
        return _json(model_page(http, self.catalog.list()["data"]), request_id)

    async def model(self, http: Request, request_id: str) -> Response:
        return _json(model_info(self.catalog.get(http.path_params["model"])), request_id)

    async def messages(self, http: Request, request_id: str) -> Response:
        start_ns = time.monotonic_ns()
        refuse_resuming(http)
        self._gate.check_room()
        check_content_type(http)
        beta = BetaFields(http.headers.get("anthropic-beta", ""))
        body = await read_body(self._gate, http, self._max_body_bytes)
        request = await self._gate.decode_in_thread(
            decode_cost(body), lambda: parse_message(json_object(body), beta, self._key)
        )
        labels = _noted(request.generation.labels, beta)
        asked = dataclasses.replace(request.generation, labels=labels)
        answer = partial(self._answer, http, request, request_id)
        return await traced_answer(self._gate, self.catalog, http, start_ns, asked, answer)

    async def _answer(
        self, http: Request, request: MessageRequest, request_id: str, target: Target, trace: RequestTrace | None
    ) -> Response:
        request = _fitted(request, target)
        asked = request.generation
        identity = Identity.of(asked, target.model.fingerprint, request_id.removeprefix("req_"))
        plan = plan_answer(asked, target)
        generation = Generation(self._gate, asked, target, identity.id, plan=plan, trace=trace)
        release_body(http)
        headers = partial(self._headers, http, target, request_id)
        if asked.stream is None:
            work = whole_message(generation, request, identity, plan, self._key)
            return await whole_answer(http, generation, work, headers)
        writer = MessageWriter(request, identity, plan, self._key, request_id)
        return await streamed_answer(http, generation, writer, headers)

    def _headers(self, http: Request, target: Target, request_id: str) -> dict[str, str]:
        return load_headers(self._gate.server, http, target.name) | {REQUEST_ID: request_id}

    async def count_tokens(self, http: Request, request_id: str) -> Response:
        self._gate.check_room()
        check_content_type(http)
        beta = BetaFields(http.headers.get("anthropic-beta", ""))
        body = await read_body(self._gate, http, self._max_body_bytes)
        request = await self._gate.decode_in_thread(
            decode_cost(body), lambda: parse_prompt(json_object(body), beta, self._key)
        )
        if labels := _noted({}, beta):
            http.scope[LABELS] = logged(labels)
        prompt = request.prompts[0]
        target = self.catalog.require(request.model, prompt.name)
        plan_answer(request, target)
        release_body(http)
        try:
            asked = describe_prompt(self._gate, target, prompt, (RETURN_NUM_INPUT_TOKENS,), request_id=request_id)
            described = await unless_disconnected(http, asked)
        except OpenAIError as error:
            raise request.in_own_fields(error) from None
        return _json({"input_tokens": described.num_tokens}, request_id)


def _fitted(request: MessageRequest, target: Target) -> MessageRequest:
    """A model that does not reason stays below every budget of reasoning: agents send one to every model."""
    asked = request.generation
    if asked.reasoning.budget_tokens is None or target.model.formats.reasoning is not None:
        return request
    reasoning = dataclasses.replace(asked.reasoning, budget_tokens=None)
    return dataclasses.replace(request, generation=dataclasses.replace(asked, reasoning=reasoning))


def _noted(labels: JsonObject, beta: BetaFields) -> JsonObject:
    """What the access log says: how the client calls the request, and what of it is passed over."""
    beta.write_log()
    return labels | ({"passed_over": ",".join(beta.passed_over)} if beta.passed_over else {})


def _guarded(handler: Endpoint) -> _Handler:
    """`handler`, with its exceptions turned into responses."""

    async def endpoint(http: Request) -> Response:
        request_id = f"req_{uuid.uuid4().hex}"
        try:
            _check_version(http)
            return await handler(http, request_id)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return error_response(OpenAIError.of(error), request_id)

    return endpoint


def _by_client(own: _Handler, openai: _Handler) -> _Handler:
    """Of a path of both APIs: requests of Anthropic's clients say their version."""

    async def endpoint(http: Request) -> Response:
        return await (own if VERSION in http.headers else openai)(http)

    return endpoint


def _check_version(http: Request) -> None:
    """Raises OpenAIError for a version that this server does not know. Without one, as many tools send requests, it is
    the only one."""
    version = http.headers.get(VERSION)
    if version is not None and version not in _VERSIONS:
        message = f"header '{VERSION}' is {as_json(version)}, expected {' or '.join(_VERSIONS)}"
        raise OpenAIError(message, param=VERSION, code="invalid_value")


class _UnknownPath:
    """Answers requests below /v1/messages that no route takes. An ASGI application: a route to a function must name its
    methods."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await _guarded(_refuse)(Request(scope, receive))
        await response(scope, receive, send)


async def _refuse(http: Request, request_id: str) -> Response:
    path = http.url.path
    if path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = error_response(OpenAIError(f"{http.method} is not allowed on {path}", status=405), request_id)
        response.headers["Allow"] = "POST"
        return response
    if path.startswith("/v1/messages/batches"):
        raise OpenAIError("batches are not supported: this server stores no requests", status=404)
    raise OpenAIError(f"unknown URL: {http.method} {path}", status=404)


def _json(value: JsonObject, request_id: str) -> Response:
    return Response(orjson.dumps(value), headers={REQUEST_ID: request_id}, media_type="application/json")
