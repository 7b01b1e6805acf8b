"""The endpoints under /v1: models, chat completions, completions, responses.

For: the HTTP application (`app.include_router(create_openai_router(server))`). Does not know: any
backend. Invariant: every path under /v1 answers in OpenAI's shapes, errors included, and no request outlives its
client. Routes are plain Starlette ones, not FastAPI's: a body is read within the server's bounds, and its errors have
OpenAI's shape (see requests.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import orjson
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from llmbackend.core.host_protocol import Host
from llmbackend.core.tracing.trace import RequestTrace
from llmbackend.frontends.http.event_stream import EventSource, pieces_of
from llmbackend.frontends.http.request_body import release_body
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.journals.resumable_http import (
    begin_recording,
    come_back,
    is_resumable,
    last_event_id,
    open_stream,
)
from llmbackend.frontends.journals.resumable_streams import ResumableStreams
from llmbackend.frontends.journals.stream_record import Recording
from llmbackend.frontends.operations.metrics import load_headers

from .answer_plan import AnswerPlan, plan_answer
from .answer_streams import chunk_writer
from .answering import streamed_answer, traced_answer, whole_answer
from .errors import CLIENT_CLOSED_REQUEST, JsonObject, OpenAIError
from .generation import Generation
from .lora_endpoints import LoraEndpoints
from .models import ModelCatalog, Target
from .prompt_details import PromptFirst, Writer
from .render_endpoints import RenderEndpoints
from .requests import (
    GenerationRequest,
    check_content_type,
    decode_cost,
    json_object,
    parse_chat,
    parse_completion,
    read_body,
)
from .responses import Identity, whole_response
from .responses_api.background import BackgroundResponses
from .responses_api.conversation_endpoints import ConversationEndpoints
from .responses_api.conversations import Conversations
from .responses_api.create import ResponseCreation
from .responses_api.input_tokens import InputTokenEndpoints
from .responses_api.stored_endpoints import StoredResponseEndpoints
from .schema import REQUEST_ID, StreamOptions
from .sealed_reasoning import FIXED_KEY, SealingKey
from .stream_interval import IntervalWriter
from .tokenization_endpoints import TokenizationEndpoints

Endpoint = Callable[[Request], Awaitable[Response]]
DEFAULT_MAX_BODY_BYTES = 4 << 20
"""The text of a million tokens; JSON of that size is parsed in some 50 ms, all of which hold the interpreter's lock."""
_REQUEST_ID = re.compile(REQUEST_ID)


def create_openai_router(
    server: Host,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    gate: InferenceGate | None = None,
    lora_separator: str = "",
    streams: ResumableStreams | None = None,
    store: ResponseStore | None = None,
    sealing_key: SealingKey = FIXED_KEY,
    lora_folder: str = "",
) -> APIRouter:
    """A router with all of /v1. Include it before any other route under /v1: it answers unknown paths there
    itself. `gate` and `streams` are those that other frontends of `server` use. store: keeps responses; sealing_key:
    see sealed_reasoning.py."""
    gate = gate or InferenceGate(server)
    catalog = ModelCatalog(server, lora_separator)
    service = _OpenAIService(gate, catalog, max_body_bytes, streams or ResumableStreams())
    router = APIRouter()
    every, one = model_endpoints(service.catalog)
    router.add_route("/v1/models", every, methods=["GET"])
    router.add_route("/v1/models/{model:path}", one, methods=["GET"])
    router.add_route("/v1/chat/completions", _guarded(service.chat), methods=["POST"])
    router.add_route("/v1/completions", _guarded(service.completions), methods=["POST"])
    conversations = Conversations(store, gate, max_body_bytes) if store is not None else None
    for method, path, endpoint in ConversationEndpoints(gate, conversations, max_body_bytes).routes():
        router.add_route(path, _guarded(endpoint), methods=[method])
    posts = TokenizationEndpoints(gate, catalog, max_body_bytes).routes()
    posts |= RenderEndpoints(gate, catalog, max_body_bytes).routes()
    for path, endpoint in (posts | LoraEndpoints(gate, catalog, lora_folder).routes()).items():
        router.add_route(path, _guarded(endpoint), methods=["POST"])
    background = BackgroundResponses(gate, catalog, store, conversations, sealing_key) if store is not None else None
    responses = ResponseCreation(gate, catalog, max_body_bytes, store, conversations, sealing_key, background)
    router.add_route("/v1/responses", _guarded(responses.create), methods=["POST"])
    for path, endpoint in InputTokenEndpoints(gate, catalog, responses, max_body_bytes).routes().items():
        router.add_route(path, _guarded(endpoint), methods=["POST"])
    for method, path, endpoint in StoredResponseEndpoints(gate, store, background, sealing_key).routes():
        router.add_route(path, _guarded(endpoint), methods=[method])
    unknown = _UnknownPath(tuple(router.routes))
    router.routes += [Route(path, unknown) for path in ("/tokenize", "/detokenize", "/v1", "/v1/{path:path}")]
    return router


def model_endpoints(catalog: ModelCatalog) -> tuple[Endpoint, Endpoint]:
    """Every model, and one of them."""

    async def every(request: Request) -> Response:
        return _json(catalog.list())

    async def one(request: Request) -> Response:
        return _json(catalog.get(request.path_params["model"]))

    return _guarded(every), _guarded(one)


class _OpenAIService:
    def __init__(
        self, gate: InferenceGate, catalog: ModelCatalog, max_body_bytes: int, streams: ResumableStreams
    ) -> None:
        self._gate = gate
        self._streams = streams
        self.catalog = catalog
        self._max_body_bytes = max_body_bytes

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, parse_chat)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, parse_completion)

    async def _generate(self, http: Request, parse: Callable[[JsonObject], GenerationRequest]) -> Response:
        start_ns = time.monotonic_ns()
        if last_event_id(http):
            return await self._come_back(http)
        self._gate.check_room()
        check_content_type(http)
        body = await read_body(self._gate, http, self._max_body_bytes)
        request = await self._gate.decode_in_thread(decode_cost(body), lambda: parse(json_object(body)))
        if is_resumable(http) and request.stream is None:
            raise OpenAIError("the header 'X-Resumable-Stream' is 'true', expected only with 'stream': true")
        answer = partial(self._answer, http, request, begin_recording(self._streams, http, body))
        return await traced_answer(self._gate, self.catalog, http, start_ns, request, answer)

    async def _answer(
        self,
        http: Request,
        request: GenerationRequest,
        recording: Recording | None,
        target: Target,
        trace: RequestTrace | None,
    ) -> Response:
        identity = Identity.of(request, target.model.fingerprint, _request_id(http) or request.request_id)
        if recording is not None:
            identity = identity.recorded(recording)
        plan = plan_answer(request, target)
        generation = Generation(self._gate, request, target, identity.id, plan=plan, trace=trace, recording=recording)
        release_body(http)
        headers = partial(load_headers, self._gate.server, http, target.name)
        if request.stream is None:
            work = whole_response(generation, request, identity, plan)
            return await whole_answer(http, generation, work, headers)
        writer = _writer(request, identity, request.stream, plan)
        make = partial(self._resumable, http) if is_resumable(http) else None
        return await streamed_answer(http, generation, writer, headers, make=make)

    async def _resumable(
        self, http: Request, events: EventSource, on_close: Callable[[], None], headers: Mapping[str, str]
    ) -> Response:
        return await open_stream(self._streams, http, pieces_of(events), on_close, headers)

    async def _come_back(self, http: Request) -> Response:
        """The rest of a stream. The body, which a client that repeats its request sends again, is not looked at."""
        await read_body(self._gate, http, self._max_body_bytes)
        release_body(http)
        return await come_back(self._streams, http)


def _guarded(handler: Endpoint) -> Endpoint:
    """`handler`, with its exceptions turned into responses."""

    async def endpoint(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            return OpenAIError.of(error).response()

    return endpoint


class _UnknownPath:
    """Answers requests that no route takes. An ASGI application: a route to a function must name its methods."""

    def __init__(self, known: Sequence[BaseRoute]) -> None:
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await _guarded(self._refuse)(Request(scope, receive))
        await response(scope, receive, send)

    async def _refuse(self, request: Request) -> Response:
        path = request.url.path
        if request.headers.get("upgrade", "").lower() == "websocket":
            message = f"WebSocket mode is not supported: send a POST with 'stream': true to {path}"
            raise OpenAIError(message, status=501, code="unsupported")
        if allowed := self._methods(request.scope):
            error = OpenAIError(f"{request.method} is not allowed on {path}", status=405, code="method_not_allowed")
            response = error.response()
            response.headers["Allow"] = ", ".join(allowed)
            return response
        raise OpenAIError(f"unknown URL: {request.method} {path}", status=404, code="unknown_url")

    def _methods(self, scope: Scope) -> list[str]:
        """Those that the path takes."""
        routes = [route for route in self._known if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE]
        return sorted({method for route in routes for method in route.methods or ()} - {"HEAD"})


def _writer(request: GenerationRequest, identity: Identity, options: StreamOptions, plan: AnswerPlan | None) -> Writer:
    writer: Writer = chunk_writer(request, identity, options, plan)
    if request.stream_interval_tokens > 1:
        writer = IntervalWriter(writer, request.stream_interval_tokens)
    return PromptFirst(writer, request.n) if request.prompt_form.is_asked else writer


def _request_id(http: Request) -> str:
    """The client's own id, as vLLM takes it; "" for none, and for one that no id of a response can hold."""
    request_id = http.headers.get("x-request-id", "")
    return request_id if _REQUEST_ID.fullmatch(request_id) else ""


def _json(value: JsonObject) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
