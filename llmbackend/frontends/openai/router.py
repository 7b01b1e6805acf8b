"""The router of /v1, and the endpoints of models, chats and completions.

Invariant: every path under /v1 answers in OpenAI's format, including errors, and no request outlives its client.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from llmbackend.core.tracing.trace import RequestTrace

from ..access.request_identity import REQUEST_IDENTITY
from ..context import FrontendContext
from ..generation.answer import Identity
from ..generation.http_answers import Writer, streamed_answer, traced_answer, whole_answer
from ..generation.inferences import Generation
from ..generation.models import Target
from ..generation.plan import AnswerPlan, plan_answer
from ..generation.request import GenerationRequest, StreamForm
from ..http.errors import JsonObject, OpenAIError
from ..http.event_stream import EventSource, pieces_of
from ..http.request_body import release_body
from ..http.request_scope import HANDED_OVER, HandedOver
from ..http.routing import CatchAll, get, post
from ..journals.journal import Recording
from ..journals.resumable_streams import begin_recording, is_resumable, last_event_id, open_stream, resume_stream
from ..operations.probes import load_headers
from .bodies import WholeAnswer, whole_response
from .chunks import CollectingWriter, IntervalWriter, PromptFirst, chunk_writer
from .endpoints import OpenAIEndpoints, json_answer, read_body
from .http_types import ChatCompletion, Completion, Model, ModelList
from .lora_endpoints import LoraEndpoints
from .prompt_endpoints import PromptEndpoints, TokenizerInfoEndpoints
from .requests import parse_chat, parse_completion, with_defaults
from .responses_api.compaction import CompactionEndpoints
from .responses_api.conversations import ConversationEndpoints
from .responses_api.create import ResponseCreation
from .responses_api.stored_endpoints import StoredResponseEndpoints
from .schema import REQUEST_ID, ChatCompletionRequest, CompletionRequest
from .stored_chats import ChatKeeper, StoredChatEndpoints

_REQUEST_ID = re.compile(REQUEST_ID)
_NO_POOLING: Final = "only models that generate text are served"
_NOT_SERVED: Final[Mapping[str, str]] = {
    "/v1/chat/completions/batch": "send one request per conversation; the server batches them",
    "/generative_scoring": "use /v1/completions with 'prompt_logprobs' or 'logprob_token_ids'",
    **dict.fromkeys(("/v1/embeddings", "/v1/moderations", "/v1/rerank", "/v1/score"), _NO_POOLING),
    **dict.fromkeys(
        ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/generations"),
        "models read and write text only",
    ),
    "/v1/batches": "send the requests themselves; the server batches them",
    "/v1/files": "send the contents with the request, as text",
}
"""Paths of OpenAI's and vLLM's servers that are refused, and why."""


def create_openai_router(context: FrontendContext) -> APIRouter:
    """All of /v1, including unknown paths."""
    responses = ResponseCreation(context)
    router = APIRouter()
    for api in (
        ModelEndpoints(context),
        ConversationEndpoints(context),
        PromptEndpoints(context),
        *((TokenizerInfoEndpoints(context),) if context.options.shows_tokenizers else ()),
        LoraEndpoints(context),
        responses,
        CompactionEndpoints(context, responses),
        StoredResponseEndpoints(context, responses.background),
        StoredChatEndpoints(context),
    ):
        api.add_to(router)
    unknown = CatchAll(OpenAIEndpoints(context), partial(_refuse, tuple(router.routes)))
    router.routes[:0] = [Route(path, unknown) for path in _NOT_SERVED]
    paths = ("/invocations", "/tokenize", "/detokenize", "/tokenizer_info", "/v1", "/v1/{path:path}")
    router.routes += [Route(path, unknown) for path in paths]
    return router


_CHUNKS: Final = "The whole answer, or with `stream` an event per chunk, then `data: [DONE]`."


class ModelEndpoints(OpenAIEndpoints):
    def __init__(self, context: FrontendContext) -> None:
        super().__init__(context)
        self._streams = context.streams
        self._defaults = context.options.request_defaults

    @get("/v1/models", answer=ModelList)
    async def models(self, http: Request) -> Response:
        """List the models"""
        return json_answer(orjson.dumps(await self._catalog.list()))

    @get("/v1/models/{model:path}", answer=Model)
    async def model(self, http: Request) -> Response:
        """Describe a model"""
        return json_answer(orjson.dumps(await self._catalog.get(http.path_params["model"])))

    @post("/v1/chat/completions", body=ChatCompletionRequest, answer=ChatCompletion, streams=_CHUNKS)
    async def chat(self, http: Request) -> Response:
        """Answer a conversation"""
        return await self._generate(http, parse_chat)

    @post("/v1/completions", body=CompletionRequest, answer=Completion, streams=_CHUNKS)
    async def completions(self, http: Request) -> Response:
        """Complete a text"""
        return await self._generate(http, parse_completion)

    @post(
        "/invocations",
        body=ChatCompletionRequest | CompletionRequest,
        answer=ChatCompletion | Completion,
        streams=_CHUNKS,
    )
    async def invocations(self, http: Request) -> Response:
        """Answer a conversation, or complete a text (SageMaker)"""
        return await self._generate(http, lambda body: (parse_chat if "messages" in body else parse_completion)(body))

    async def _generate(self, http: Request, parse: Callable[[JsonObject], GenerationRequest]) -> Response:
        start_ns = time.monotonic_ns()
        if last_event_id(http):
            return await resume_stream(self._streams, http, read_body(self._gate, http, self._max_body_bytes))
        self._gate.check_capacity()
        body = await self.body_of(http)
        request = await self.parsed_body(body, lambda fields: parse(with_defaults(fields, self._defaults)))
        request = await self._catalog.with_model(request)
        if is_resumable(http) and request.stream is None:
            raise OpenAIError("the header 'X-Resumable-Stream' requires 'stream': true")
        if request.stored is not None and self._context.store is None:
            return _handed_over(http, body)
        answer = partial(self._answer, http, request, begin_recording(self._streams, http, body))
        return await traced_answer(self._gate, self._catalog, http, start_ns, request, answer)

    async def _answer(
        self,
        http: Request,
        request: GenerationRequest,
        recording: Recording | None,
        target: Target,
        trace: RequestTrace | None,
    ) -> Response:
        own_id = "" if request.stored is not None else _request_id(http) or request.request_id
        salt = uuid.uuid4().hex if own_id else ""
        identity = Identity.of(request, target.model.fingerprint, own_id, salt)
        if recording is not None:
            identity = identity.recorded(recording)
        plan = plan_answer(request, target)
        generation = Generation(self._gate, request, target, identity.id, plan=plan, trace=trace, recording=recording)
        await generation.submit_all()
        release_body(http)
        headers = partial(load_headers, self._gate.server, http, target.name)
        keeper = self._keeper(request, identity, target)
        if request.stream is None:
            work = _whole(generation, WholeAnswer(request, identity, plan), keeper)
            return await whole_answer(http, generation, work, headers)
        writer, before_end = _writer(request, identity, request.stream, plan), None
        if keeper is not None:
            writer, before_end = _kept(writer, generation, WholeAnswer(request, identity, plan), keeper)
        make = partial(self._resumable, http) if is_resumable(http) else None
        return await streamed_answer(
            http, generation, writer, headers, before_end, make, quiet_s=self._defaults.sse_keep_alive_s
        )

    def _keeper(self, request: GenerationRequest, identity: Identity, target: Target) -> ChatKeeper | None:
        store = self._context.store
        if store is None or request.stored is None:
            return None
        return ChatKeeper(store, request.stored, request, identity, target)

    async def _resumable(
        self, http: Request, events: EventSource, on_close: Callable[[], None], headers: Mapping[str, str]
    ) -> Response:
        return await open_stream(self._streams, http, pieces_of(events), on_close, headers)


def _handed_over(http: Request, body: bytes) -> Response:
    """In a frontend process: has the host, which owns the store, answer instead."""
    if HANDED_OVER not in http.scope:
        message = "'store' is not supported: this server stores no chat completions"
        raise OpenAIError(message, param="store", code="unsupported_parameter")
    if (identity := REQUEST_IDENTITY.get()) is not None:
        identity.give_back()
    return HandedOver(body)


async def _whole(generation: Generation, answer: WholeAnswer, keeper: ChatKeeper | None) -> bytes:
    body = await whole_response(generation, answer)
    if keeper is not None:
        await keeper.keep(body)
    return body


def _kept(
    writer: Writer, generation: Generation, answer: WholeAnswer, keeper: ChatKeeper
) -> tuple[Writer, Callable[[], Awaitable[None]]]:
    """A stream's writer, and what stores its answer before its last events are sent."""
    collecting = CollectingWriter(writer, answer)

    async def keep() -> None:
        if collecting.has_ended:
            await keeper.keep(await answer.body(generation))

    return collecting, keep


async def _refuse(known: Sequence[BaseRoute], http: Request) -> Response:
    path = http.url.path
    if http.headers.get("upgrade", "").lower() == "websocket":
        message = f"WebSocket mode is not supported: send a POST with 'stream': true to {path}"
        raise OpenAIError(message, status=501, code="unsupported")
    if (reason := _NOT_SERVED.get(path)) is not None:
        raise OpenAIError(f"{path} is not supported: {reason}", status=404, code="unknown_url")
    if allowed := _methods(known, http.scope):
        error = OpenAIError(f"{http.method} is not allowed on {path}", status=405, code="method_not_allowed")
        response = error.response()
        response.headers["Allow"] = ", ".join(allowed)
        return response
    raise OpenAIError(f"unknown URL: {http.method} {path}", status=404, code="unknown_url")


def _methods(known: Sequence[BaseRoute], scope: Scope) -> list[str]:
    routes = [route for route in known if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE]
    return sorted({method for route in routes for method in route.methods or ()} - {"HEAD"})


def _writer(request: GenerationRequest, identity: Identity, form: StreamForm, plan: AnswerPlan) -> Writer:
    writer: Writer = chunk_writer(request, identity, form, plan)
    if form.interval_tokens > 1:
        writer = IntervalWriter(writer, form.interval_tokens)
    has_details = request.prompt_form.is_requested
    if has_details or (form.include_usage and form.continuous_usage_stats):
        return PromptFirst(writer, request.n, has_details=has_details)
    return writer


def _request_id(http: Request) -> str:
    """The client's id, as in vLLM; "" for none or an unusable one."""
    request_id = http.headers.get("x-request-id", "")
    return request_id if _REQUEST_ID.fullmatch(request_id) else ""
