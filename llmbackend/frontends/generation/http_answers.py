"""HTTP responses of generations, for all APIs: a whole body, or a stream of events.

Invariants: the generation is closed however the request ends, so no request outlives its client; all ready deltas are
sent together; an error is a stream's last event; work that grows with a prompt is done in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from llmbackend.core.tracing.trace import RequestTrace

from ..http.direct_body import DirectBody
from ..http.errors import OpenAIError
from ..http.event_stream import EventSource, EventStream, pieces_of
from ..http.request_scope import HAS_FAILED, LABELS, received, sampled, traced, unless_disconnected
from ..inference_gate import InferenceGate
from .inferences import MANY_TOKENS, Arrival, Generation, check_fields
from .models import ModelCatalog, Target
from .request import GenerationRequest
from .tensors import Delta


class Writer(Protocol):
    """Formats the events of a stream."""

    def begin(self) -> bytes: ...
    def begin_choice(self, index: int, first: Delta) -> bytes:
        """first: the first delta of its prompt, which need not be this choice's"""
        ...

    def delta(self, index: int, delta: Delta) -> bytes: ...
    def end(self) -> bytes: ...

    def ping(self) -> bytes:
        """Keeps a silent stream alive."""
        ...

    def fail(self, error: OpenAIError) -> bytes:
        """The end of a stream that failed."""
        ...


_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}
_CONTENT_TYPE: Final = {"content-type": "text/event-stream; charset=utf-8"}


def stream_headers(more: Mapping[str, str]) -> dict[str, str]:
    return {**_HEADERS, **more, **_CONTENT_TYPE}


class AnswerEvents:
    """An EventSource: a generation's deltas as events of `writer`."""

    def __init__(
        self,
        generation: Generation,
        first: Arrival | None,
        writer: Writer,
        before_end: Callable[[], Awaitable[None]] | None,
        quiet_s: float | None,
        scope: Scope,
    ) -> None:
        """first: an already popped arrival. before_end: awaited before the last events; if it fails, the answer
        fails. scope: of the request; see HAS_FAILED"""
        self._scope = scope
        self.quiet_s = quiet_s
        self.is_over = False
        self.needs_task = True
        self._generation = generation
        self._writer = writer
        self._before_end = before_end
        self._has_begun = False
        self._held = first
        """An arrival that was popped but not written yet."""
        self._error: Exception | None = None

    def listen(self, listener: Callable[[], None]) -> None:
        self._generation.listen(listener)

    def ready(self) -> bytes:
        if self.needs_task or self.is_over:
            return b""
        generation = self._generation
        parts: list[bytes] = []
        try:
            while (arrival := generation.pop()) is not None:
                if self._is_long(arrival[1]):
                    self._held, self.needs_task = arrival, True
                    return b"".join(parts)
                parts.append(self._writer.delta(*arrival))
            self.needs_task = generation.is_over
        except Exception as error:
            self._error, self.needs_task = error, True
        return b"".join(parts)

    async def awaited(self) -> bytes:
        self.needs_task = False
        held, self._held = self._held, None
        piece = b""
        try:
            piece = self._begin()
            if held is not None:
                piece += await self._written(held)
        except Exception as error:
            self._error = error
        if self._error is None and not self._generation.is_over:
            return piece
        return piece + await self._end()

    def ping(self) -> bytes:
        return self._writer.ping()

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._writer.begin()

    async def _written(self, arrival: Arrival) -> bytes:
        if not self._is_long(arrival[1]):
            return self._writer.delta(*arrival)
        return await self._generation.in_thread(partial(self._writer.delta, *arrival))

    def _is_long(self, delta: Delta) -> bool:
        """Whether its events list a prompt, or repeat many logprobs at the end of a text."""
        is_end = delta.is_final or delta.finish_reason is not None
        return delta.prompt is not None or (is_end and self._generation.num_logprobs > MANY_TOKENS)

    async def _end(self) -> bytes:
        self.is_over = True
        try:
            if self._error is not None:
                raise self._error
            await self._generation.checked()
            end = await self._at_end(self._writer.end)
        except Exception as error:
            end = await self._failed(error)
        if self._before_end is not None:
            try:
                await self._before_end()
            except Exception as error:
                end = await self._failed(error)
        return end

    async def _failed(self, error: Exception) -> bytes:
        self._scope[HAS_FAILED] = True
        return await self._at_end(partial(self._writer.fail, OpenAIError.of(error)))

    async def _at_end(self, write: Callable[[], bytes]) -> bytes:
        return await self._generation.in_thread_if_long(self._generation.num_logprobs, write)


_LOGGED_CHARS = 64
"""Limit for each label, after escaping."""


def logged(labels: dict[str, Any]) -> str:
    """` name="value"` for each label, in one line of ASCII."""
    return "".join(f" {name}={_quoted(value)}" for name, value in labels.items())


def _quoted(value: Any) -> str:
    text = json.dumps(value[:_LOGGED_CHARS] if isinstance(value, str) else value)
    return text if len(text) <= _LOGGED_CHARS else f"{text[:_LOGGED_CHARS]}..."


MakeStream = Callable[[EventSource, Callable[[], None], Mapping[str, str]], Awaitable[Response]]
"""(events, callback at their end, headers) → the HTTP response."""


async def traced_answer(
    gate: InferenceGate,
    catalog: ModelCatalog,
    http: Request,
    start_ns: int,
    request: GenerationRequest,
    answer: Callable[[Target, RequestTrace | None], Coroutine[Any, Any, Response]],
) -> Response:
    """Finds the model, checks that it supports all fields, then calls `answer`; logs and traces. start_ns: when the
    request arrived. Raises OpenAIError."""
    target = await catalog.require(request.model, request.prompts[0].name)
    check_fields(request, target)
    if request.labels:
        http.scope[LABELS] = logged(request.labels)
    trace = sampled(gate.server, target.name, http, start_ns)
    received(trace)
    return await traced(trace, answer(target, trace))


async def whole_answer(
    http: Request, generation: Generation, work: Coroutine[Any, Any, bytes], headers: Callable[[], Mapping[str, str]]
) -> Response:
    """work: creates the body. headers: called at the end. Raises ClientDisconnect and the errors of `work`."""
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
    *,
    quiet_s: float | None,
) -> Response:
    """Starts a stream once the first response, which may be an error, has arrived, or after `quiet_s`; raises that
    error, and ClientDisconnect. make: creates the HTTP response; by default an EventStream. See AnswerEvents for
    before_end, and EventSource for quiet_s."""
    try:
        await unless_disconnected(http, generation.wait(quiet_s))
        events = AnswerEvents(generation, generation.pop(), writer, before_end, quiet_s, http.scope)
        sent = stream_headers({**headers(), **generation.headers()})
        if make is None:
            return EventStream(pieces_of(events, DirectBody.of(http.scope)), sent, on_close=generation.close)
        return await make(events, generation.close, sent)
    except BaseException:
        generation.close()
        raise
