"""The events of one answer, from its deltas to the stream that its client reads.

For: what the endpoints of all APIs have in common (answering.py). Does not know: the APIs' forms (Writer), the
connection. Invariants: all deltas that are ready become one piece; an error is the last event. Work in proportion to a
prompt is done in a thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from starlette.requests import Request

from llmbackend.frontends.http.request_scope import unless_disconnected

from .errors import OpenAIError
from .generation import Arrival, Generation
from .prompt_details import Writer

QUIET_S: Final = 15.0
"""Seconds without an event after which a stream sends a ping, so that proxies keep the connection; also how long the
status line waits for the first response, which may be an error."""
_HEADERS: Final = {"cache-control": "no-store", "x-accel-buffering": "no"}
_CONTENT_TYPE: Final = {"content-type": "text/event-stream; charset=utf-8"}


def stream_headers(more: Mapping[str, str]) -> dict[str, str]:
    return {**_HEADERS, **more, **_CONTENT_TYPE}


async def first_arrival(http: Request, generation: Generation) -> Arrival | None:
    """The first response of a stream, None after QUIET_S without one. Awaited before the status line is sent, since it
    may be an error, which is raised. Raises ClientDisconnect when the client goes away."""
    await unless_disconnected(http, generation.wait(QUIET_S))
    return generation.pop()


class AnswerEvents:
    """An EventSource: what `writer` makes of the generation's deltas."""

    def __init__(
        self,
        generation: Generation,
        first: Arrival | None,
        writer: Writer,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """first: what was popped already. before_end: awaited when the last events are made, before they are sent; its
        failure is the answer's."""
        self.quiet_s: float | None = QUIET_S
        self.is_over = False
        self.needs_task = True
        self._generation = generation
        self._writer = writer
        self._before_end = before_end
        self._has_begun = False
        self._held = first
        """Popped, and not written yet."""
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
                if arrival[1].prompt is not None:
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
        if arrival[1].prompt is None:
            return self._writer.delta(*arrival)
        return await self._generation.in_thread(partial(self._writer.delta, *arrival))

    async def _end(self) -> bytes:
        self.is_over = True
        try:
            if self._error is not None:
                raise self._error
            await self._generation.checked()
            end = self._writer.end()
        except Exception as error:
            end = self._failed(error)
        if self._before_end is not None:
            try:
                await self._before_end()
            except Exception as error:
                end = self._failed(error)
        return end

    def _failed(self, error: Exception) -> bytes:
        return self._writer.fail(OpenAIError.of(error))
