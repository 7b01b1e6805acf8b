"""The endpoints under /v1: models, chat completions, completions.

For: whoever assembles the HTTP server (`app.include_router(create_openai_router(server))`). Does not know: any
backend. Invariant: every path under /v1 answers in OpenAI's shapes, errors included, and no request outlives its
client. Routes are plain Starlette ones: bodies are validated by hand (see `fields.py`), so that errors name field,
value and range.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import orjson
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.tracing.trace import RequestTrace
from llmbackend.frontends.http_tracing import received, sampled, traced
from llmbackend.frontends.inference import InferenceGate
from llmbackend.frontends.orca import load_headers
from llmbackend.frontends.request_body import release_body

from .catalog import ModelCatalog, Target
from .chunks import PING, ChunkWriter
from .errors import OpenAIError
from .fields import JsonObject
from .generation import Arrival, Generation, check_followed
from .http import EventStream, check_content_type, json_object, read_body, unless_disconnected
from .requests import GenerationRequest, parse_chat, parse_completion
from .responses import Identity, whole_response

Endpoint = Callable[[Request], Awaitable[Response]]
DEFAULT_MAX_BODY_BYTES = 4 << 20
"""The text of a million tokens; JSON of that size is parsed in some 50 ms, all of which hold the interpreter's lock."""
_QUIET_S = 15.0
"""A stream silent for so long sends a ping, lest a proxy take it for dead; also how long the first answer may take
before the stream begins without knowing whether it is an error."""
_CLIENT_CLOSED_REQUEST = 499


def create_openai_router(
    server: InferenceServer,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    gate: InferenceGate | None = None,
    lora_separator: str = "",
) -> APIRouter:
    """A router with all of /v1. Include it before any other route under /v1: it answers unknown paths there
    itself. `gate` is the one that other frontends of `server` use."""
    service = _OpenAIService(gate or InferenceGate(server), max_body_bytes, lora_separator)
    router = APIRouter()
    router.add_route("/v1/models", _guarded(service.models), methods=["GET"])
    router.add_route("/v1/models/{model:path}", _guarded(service.model), methods=["GET"])
    router.add_route("/v1/chat/completions", _guarded(service.chat), methods=["POST"])
    router.add_route("/v1/completions", _guarded(service.completions), methods=["POST"])
    router.routes.append(Route("/v1/{path:path}", _NothingHere()))
    return router


class _OpenAIService:
    def __init__(self, gate: InferenceGate, max_body_bytes: int, lora_separator: str) -> None:
        self._gate = gate
        self._catalog = ModelCatalog(gate.server, lora_separator)
        self._max_body_bytes = max_body_bytes

    async def models(self, request: Request) -> Response:
        return _json(self._catalog.list())

    async def model(self, request: Request) -> Response:
        return _json(self._catalog.get(request.path_params["model"]))

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, parse_chat)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, parse_completion)

    async def _generate(self, http: Request, parse: Callable[[JsonObject], GenerationRequest]) -> Response:
        start_ns = time.monotonic_ns()
        self._gate.check_room()
        check_content_type(http)
        body = await read_body(self._gate, http, self._max_body_bytes)
        request = await self._gate.decoded(len(body), lambda: parse(json_object(body)))
        # All prompts of a request are the same kind of tensor, or texts and token ids side by side.
        target = self._catalog.require(request.model, {prompt.name for prompt in request.prompts})
        check_followed(request, target)
        trace = sampled(self._gate.server, target.name, http, start_ns)
        received(trace)
        return await traced(trace, self._answer(http, request, target, trace))

    async def _answer(
        self, http: Request, request: GenerationRequest, target: Target, trace: RequestTrace | None
    ) -> Response:
        identity = Identity.of(request, target.model.fingerprint)
        generation = Generation(self._gate, request, target, identity.id, trace=trace)
        release_body(http)
        try:
            if request.stream is None:
                work = whole_response(generation, request, identity)
                body = await unless_disconnected(http.receive, work)
                generation.close()
                return Response(body, headers=self._load_headers(http, target), media_type="application/json")
            # The first answer may be an error: look at it before the status line says 200.
            await unless_disconnected(http.receive, generation.wait(_QUIET_S))
            first = generation.pop()
        except BaseException:
            generation.close()
            raise
        events = _events(generation, first, ChunkWriter(request, identity, request.stream))
        return EventStream(events, generation.close, self._load_headers(http, target))

    def _load_headers(self, http: Request, target: Target) -> dict[str, str]:
        return load_headers(self._gate.server, http, target.name)


async def _events(generation: Generation, arrival: Arrival | None, writer: ChunkWriter) -> AsyncGenerator[bytes, None]:
    """The stream's events; all that are ready go into one write. An error is the last event, without [DONE] after
    it."""
    parts = [writer.begin()]
    try:
        while True:
            while arrival is not None:
                parts.append(writer.delta(*arrival))
                arrival = generation.pop()
            if generation.is_over:
                break
            if any(parts):
                yield b"".join(parts)
            parts = [] if await generation.wait(_QUIET_S) else [PING]
            arrival = generation.pop()
        parts.append(writer.end())
    except Exception as error:
        parts.append(OpenAIError.of(error).event())
    yield b"".join(parts)


def _guarded(handler: Endpoint) -> Endpoint:
    """`handler`, with everything it raises turned into a response."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return OpenAIError.of(error).response()

    return endpoint


class _NothingHere:
    """Answers what no route takes. An ASGI application, since a route to a function has to name its methods."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await _guarded(_refuse)(Request(scope, receive))
        await response(scope, receive, send)


async def _refuse(request: Request) -> Response:
    path = request.url.path
    posts = path in ("/v1/chat/completions", "/v1/completions")
    if posts or path.startswith("/v1/models"):
        allowed = "POST" if posts else "GET"
        error = OpenAIError(f"{request.method} is not allowed on {path}", status=405, code="method_not_allowed")
        response = error.response()
        response.headers["Allow"] = allowed
        return response
    raise OpenAIError(f"unknown URL: {request.method} {path}", status=404, code="unknown_url")


def _json(value: JsonObject) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
