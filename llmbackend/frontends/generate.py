"""POST …/generate and …/generate_stream: one flat JSON object in, one object or a stream of server-sent events out.

For: the HTTP app. Does not know: LLMs (any model can be served so). Invariants: the status is fixed by the first
response, which is awaited before any header is sent; responses that are ready together leave in one write; a client
that goes away cancels.
Source: Triton's generate extension, as recorded from Triton 2.51; so a /generate that gets no response, or more than
one, from the model answers 200 with an error body, and an error as the first response is a 400 whatever its code. By
design different: UNAVAILABLE is a 503 with Retry-After, because a backend's full queue is a refusal like any other.

Streams are sent by `StreamedBody` below, not by sse-starlette's EventSourceResponse: that one ends open streams as
soon as the server is told to stop (they must drain), polls for that twice a second, watches for disconnects only from
its own call on (ours must be watched while the first response is awaited), adds headers of its own, and costs twice
the time per event.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmbackend.core.errors import ErrorCode, invalid_argument
from llmbackend.core.messages import InferenceResponse, ModelMetadata, nobody
from llmbackend.core.tracing.trace import RequestTrace

from .generate_codec import decode_request, encode_response
from .http_errors import JSON, error_body
from .http_tracing import received, sampled, traced
from .inference import Inference, InferenceGate
from .kserve_http import MODEL_PATHS, model_of
from .limits import RETRY_AFTER_S
from .mailbox import Item
from .orca import load_headers
from .parts_response import pieces
from .request_body import read_body, release_body

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
_NOT_ONE_RESPONSE: Final = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)


class StreamedBody(Response):
    """A response whose body is sent chunk by chunk as `chunks` yields.

    On every way out `chunks` is closed and `on_close` called (a generator that was never begun runs no code of its own
    when it is closed).
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        status_code: int,
        headers: Mapping[str, str],
        on_close: Callable[[], None],
    ) -> None:
        self.status_code = status_code
        retry = {"retry-after": RETRY_AFTER_S} if status_code == 503 else {}
        self.background = None
        self._chunks = chunks
        self._on_close = on_close
        self.init_headers({**headers, **retry})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_close()
            await self._chunks.aclose()


class GenerateEndpoints:
    def __init__(self, gate: InferenceGate, max_body_bytes: int) -> None:
        self._gate = gate
        self._max_body_bytes = max_body_bytes

    def add_to(self, router: APIRouter) -> None:
        for path in MODEL_PATHS:
            router.add_route(f"{path}/generate", self.generate, methods=["POST"])
            router.add_route(f"{path}/generate_stream", self.generate_stream, methods=["POST"])

    async def generate(self, request: Request) -> Response:
        model = self._model(request)
        trace = sampled(self._gate.server, model.name, request)
        return await traced(trace, self._generate(request, model, trace))

    async def generate_stream(self, request: Request) -> Response:
        model = self._model(request)
        trace = sampled(self._gate.server, model.name, request)
        return await traced(trace, self._generate_stream(request, model, trace))

    async def _generate(self, request: Request, model: ModelMetadata, trace: RequestTrace | None) -> Response:
        inference = await self._submit(request, model, trace)
        try:
            responses = await inference.collect(at_most=2)
        finally:
            inference.close()
        body = await self._printed(responses[0]) if len(responses) == 1 else error_body(_NOT_ONE_RESPONSE)
        return StreamedBody(_once(body), _status(responses), self._headers(request, JSON), inference.close)

    async def _generate_stream(self, request: Request, model: ModelMetadata, trace: RequestTrace | None) -> Response:
        inference = await self._submit(request, model, trace)
        try:
            first = await inference.next_batch()
            headers = self._headers(request, EVENT_STREAM)
        except BaseException:
            inference.close()
            raise
        return StreamedBody(self._events(inference, first), _status(_responses(first)), headers, inference.close)

    async def _events(self, inference: Inference, batch: list[Item]) -> AsyncGenerator[bytes, None]:
        while batch:
            jsons = [await self._printed(response) for response in _responses(batch)]
            if jsons:
                yield b"".join(b"data: %b\n\n" % json for json in jsons)
            batch = await inference.next_batch()

    async def _printed(self, response: InferenceResponse) -> bytes:
        return await self._gate.printed(response.outputs, _json, response)

    def _headers(self, request: Request, content_type: str) -> dict[str, str]:
        load = load_headers(self._gate.server, request, request.path_params["name"])
        return {"content-type": content_type} | load

    def _model(self, request: Request) -> ModelMetadata:
        """The model that is asked, when it may be asked so at all."""
        name, version = model_of(request)
        if request.headers.get("content-encoding", "identity") not in ("", "identity"):
            raise invalid_argument("Unsupported content-encoding, only 'identity' is supported.")
        metadata = self._gate.server.model_metadata(name, version)
        self._gate.check_room()
        return metadata

    async def _submit(self, request: Request, model: ModelMetadata, trace: RequestTrace | None) -> Inference:
        body = await read_body(request, self._max_body_bytes)
        received(trace)
        version = model_of(request)[1]
        message = await self._gate.parsed(len(body), decode_request, body, model, version, nobody)
        inference = await self._gate.send(message, trace=trace)
        release_body(request)
        inference.cancel_on_disconnect(request)
        return inference


def _status(responses: list[InferenceResponse]) -> int:
    error = responses[0].error if responses else None
    if error is None:
        return 200
    return 503 if error.code is ErrorCode.UNAVAILABLE else 400


def _responses(batch: Iterable[Item]) -> list[InferenceResponse]:
    return [response for response, _ in batch if response is not None]


def _json(response: InferenceResponse) -> bytes:
    return error_body(response.error.message) if response.error is not None else encode_response(response)


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    for piece in pieces(body):
        yield piece
