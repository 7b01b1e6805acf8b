"""Responses as streams of server-sent events: their chunks, and the HTTP response that sends them.

For: the router. Does not know: the host. Invariant: id, created and model are the same bytes in every chunk; each
choice gets its text, then exactly one finish chunk; the usage comes last. The hot path is bytes: what is the same in
every chunk is encoded once, and a token costs one orjson call for its text.

A stream is Starlette's StreamingResponse, not sse-starlette's EventSourceResponse: that one costs twice the CPU per
event, ends every open stream as soon as the server is told to exit (this server drains them), and once used wakes the
loop twice a second for ever, which an idle server must not do. The Responses API gets a writer of its own next to
ChunkWriter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import OpenAIError
from .generation import Arrival, Generation
from .logprobs import logprobs_renderer
from .prompt_details import Writer
from .requests import GenerationRequest
from .responses import DEFAULT_FINISH_REASON, Identity, Usage
from .schema import StreamOptions
from .tensors import Delta, PromptDetails

T = TypeVar("T")
QUIET_S = 15.0
"""Seconds without an event after which a stream sends a ping, so that proxies keep the connection; also how long the
status line waits for the first response, which may be an error."""
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where the text stands in a choice: chat puts it in `delta`, completions in `text`."""

    kind: str
    text_open: bytes
    text_close: bytes
    without_text: bytes


_CHAT = _Shape("chat.completion.chunk", b'"delta":{"content":', b"}", b'"delta":{}')
_COMPLETION = _Shape("text_completion", b'"text":', b"", b'"text":""')
_CHOICES = b',"choices":['
_ROLE = b'"delta":{"role":"assistant","content":""}'


class ChunkWriter:
    """The chunks of one stream, in order: `begin`, `delta` for each delta, `end`."""

    def __init__(self, request: GenerationRequest, identity: Identity, options: StreamOptions) -> None:
        self._shape = _CHAT if request.is_chat else _COMPLETION
        self._opening = b"data: " + orjson.dumps(identity.fields(self._shape.kind))[:-1]
        self._head = self._opening + _CHOICES
        self._has_usage = bool(options.include_usage)
        self._has_continuous_usage = self._has_usage and bool(options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if self._has_usage else b"]}\n\n"
        self._usage = Usage(request.n)
        self._prompt_form = request.prompt_form
        self._echo = [echo for echo in request.echo for _ in range(request.n)]
        self._finished = [False] * request.num_choices
        form, is_chat = request.logprobs, request.is_chat
        self._logprobs = [None if form is None else logprobs_renderer(form, is_chat=is_chat) for _ in self._finished]

    def begin(self) -> bytes:
        """For each choice a chunk with the role (chat), and one with the text that `echo` asks for."""
        roles = [self._chunk(index, _ROLE) for index in range(len(self._finished))] if self._shape is _CHAT else []
        return b"".join(roles) + b"".join(
            self._chunk(index, self._text(text)) for index, text in enumerate(self._echo) if text
        )

    def begin_choice(self, index: int, prompt: PromptDetails) -> bytes:
        """The first chunk of a choice whose prompt the model has told; in place of `begin`."""
        fields = orjson.dumps(self._prompt_form.fields(prompt))[1:-1]
        more = b"," + fields if fields else b""
        if self._shape is _CHAT:
            role = self._chunk(index, _ROLE)
            first = role if index else self._opening + more + _CHOICES + role[len(self._head) :]
            return first + (self._chunk(index, self._text(self._echo[index])) if self._echo[index] else b"")
        positions = self._prompt_form.positions(prompt)
        render = self._logprobs[index]
        logprobs = b"null" if render is None or not positions else orjson.dumps(render(positions))
        return self._chunk(index, self._text(self._echo[index] + prompt.text), logprobs, more=more)

    def delta(self, index: int, delta: Delta) -> bytes:
        """The chunk of new text, the finish chunk, both, or nothing (where a stop string may have begun)."""
        self._usage.add(index, delta)
        chunk = b""
        if delta.text or delta.logprobs or delta.token_ids:
            render = self._logprobs[index]
            logprobs = b"null" if render is None else orjson.dumps(render(delta.logprobs))
            more = b',"token_ids":' + orjson.dumps(delta.token_ids) if delta.token_ids else b""
            chunk = self._chunk(index, self._text(delta.text), logprobs, more=more)
        if (delta.finish_reason or delta.is_final) and not self._finished[index]:
            self._finished[index] = True
            chunk += self._finish_chunk(index, delta.finish_reason or DEFAULT_FINISH_REASON, delta)
        return chunk

    def end(self) -> bytes:
        if not self._has_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(self._usage.total()) + b"}\n\n" + DONE

    def ping(self) -> bytes:
        return PING

    def fail(self, error: OpenAIError) -> bytes:
        return error.event()

    def _finish_chunk(self, index: int, finish_reason: str, delta: Delta) -> bytes:
        more = b',"stop_reason":' + orjson.dumps(delta.stop_reason)
        reason = orjson.dumps(finish_reason)
        return self._chunk(index, self._shape.without_text, finish_reason=reason, more=more)

    def _text(self, text: str) -> bytes:
        return self._shape.text_open + orjson.dumps(text) + self._shape.text_close

    def _chunk(
        self, index: int, text: bytes, logprobs: bytes = b"null", finish_reason: bytes = b"null", more: bytes = b""
    ) -> bytes:
        tail = self._tail
        if self._has_continuous_usage:
            tail = b'],"usage":' + orjson.dumps(self._usage.as_json()) + b"}\n\n"
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b%b}%b' % (
            self._head, index, text, logprobs, finish_reason, more, tail,
        )  # fmt: skip


async def first_arrival(receive: Receive, generation: Generation) -> Arrival | None:
    """The first response of a stream, None after QUIET_S without one. Awaited before the status line is sent, since it
    may be an error, which is raised. Raises ClientDisconnect when the client goes away."""
    await unless_disconnected(receive, generation.wait(QUIET_S))
    return generation.pop()


async def events(
    generation: Generation,
    arrival: Arrival | None,
    writer: Writer,
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> AsyncGenerator[bytes, None]:
    """The stream's events; all that are ready go into one write. An error is the last event, without [DONE] after
    it. before_end: awaited when the last events are made, before they are sent; its failure is the answer's."""
    parts = [writer.begin()]
    try:
        while True:
            while arrival is not None:
                if arrival[1].prompt is None:
                    parts.append(writer.delta(*arrival))
                else:
                    parts.append(await generation.in_thread(partial(writer.delta, *arrival)))
                arrival = generation.pop()
            if generation.is_over:
                break
            if any(parts):
                yield b"".join(parts)
            parts = [] if await generation.wait(QUIET_S) else [writer.ping()]
            arrival = generation.pop()
        end = writer.end()
    except Exception as error:
        end = writer.fail(OpenAIError.of(error))
    if before_end is not None:
        try:
            await before_end()
        except Exception as error:
            end = writer.fail(OpenAIError.of(error))
    yield b"".join([*parts, end])


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect when the client goes away first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends ready-made server-sent events. `on_close` is called once when the stream is over, however it ends."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None], more_headers: Mapping[str, str]
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **more_headers}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self.stream_response(send))
        except (ClientDisconnect, OSError):
            return
        finally:
            self._on_close()
            await self._events.aclose()
