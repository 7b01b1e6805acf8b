"""What endpoints have in common that answer with a generation: the way to its model, a whole body or a stream, and no
request that outlives its client.

For: the routers of the APIs. Does not know: their forms. Invariant: the generation is closed however the request ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.tracing.trace import RequestTrace
from llmbackend.frontends.http.direct_body import DirectBody
from llmbackend.frontends.http.event_stream import EventSource, EventStream, pieces_of
from llmbackend.frontends.http.request_scope import LABELS, received, sampled, traced, unless_disconnected
from llmbackend.frontends.inference_gate import InferenceGate

from .answer_events import AnswerEvents, first_arrival, stream_headers
from .generation import Generation, check_fields_taken
from .labels import logged
from .models import ModelCatalog, Target
from .prompt_details import Writer
from .requests import GenerationRequest

MakeStream = Callable[[EventSource, Callable[[], None], Mapping[str, str]], Awaitable[Response]]
"""(events, what is called when they are over, headers) → the HTTP response that sends them."""


async def traced_answer(
    gate: InferenceGate,
    catalog: ModelCatalog,
    http: Request,
    start_ns: int,
    request: GenerationRequest,
    answer: Callable[[Target, RequestTrace | None], Coroutine[Any, Any, Response]],
) -> Response:
    """What `answer` makes of a request whose model is there and takes all its fields; logged and traced. start_ns: when
    the request came. Raises OpenAIError."""
    target = catalog.require(request.model, request.prompts[0].name)
    check_fields_taken(request, target)
    if request.labels:
        http.scope[LABELS] = logged(request.labels)
    trace = sampled(gate.server, target.name, http, start_ns)
    received(trace)
    return await traced(trace, answer(target, trace))


async def whole_answer(
    http: Request, generation: Generation, work: Coroutine[Any, Any, bytes], headers: Callable[[], Mapping[str, str]]
) -> Response:
    """The answer that `work` makes of the generation. headers: asked for at the end. Raises ClientDisconnect when the
    client goes away, and what `work` raises."""
    try:
        body = await unless_disconnected(http, work)
        of_schemas = await generation.checked()
    finally:
        generation.close()
    return Response(body, headers={**headers(), **of_schemas}, media_type="application/json")


async def streamed_answer(
    http: Request,
    generation: Generation,
    writer: Writer,
    headers: Callable[[], Mapping[str, str]],
    before_end: Callable[[], Awaitable[None]] | None = None,
    make: MakeStream | None = None,
) -> Response:
    """The stream that `writer` makes of the generation, once its first response is here, which may be an error: that
    one is raised. before_end: awaited before the last events are sent. make: None: an EventStream."""
    try:
        first = await first_arrival(http, generation)
        events = AnswerEvents(generation, first, writer, before_end)
        sent = stream_headers({**headers(), **generation.headers()})
        if make is None:
            return EventStream(pieces_of(events, DirectBody.of(http.scope)), sent, on_close=generation.close)
        return await make(events, generation.close, sent)
    except BaseException:
        generation.close()
        raise
