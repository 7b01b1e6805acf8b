"""What the ASGI scope of a request carries beyond ASGI: client presence, headers as sent, the request's trace.

Invariants: callbacks of ClientPresence are called at most once, on the event loop, and never after `forget`; cancelled
work has ended by the time its caller is notified; a request's trace is closed however the request ends. Source:
HTTP_RECV_START … HTTP_SEND_END of Triton's http_server (golden 60), in which sending a stream has the time 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmbackend.core.host_protocol import Host
from llmbackend.core.tracing.trace import RequestTrace

PRESENCE: Final = "llmbackend.client_presence"
"""Scope key of a ClientPresence, set by GuardedProtocol."""
SENT_NAMES: Final = "llmbackend.sent_header_names"
"""Scope key: header names as the client wrote them; only under CaseKeepingProtocol."""
LABELS: Final = "llmbackend.request_labels"
"""Scope key: text that the access log adds to a request's line."""
HAS_FAILED: Final = "llmbackend.has_failed"
"""Scope key, set when a stream of status 200 gets an error event."""


HANDED_OVER: Final = "llmbackend.handed_over"
"""Scope key, set in frontend processes only: the body of a request that the host must answer instead, else None."""


IS_COUNTED: Final = "llmbackend.is_counted"
"""Scope key, set in the host: whether a frontend process handed the request over, and has counted its acceptance."""


class HandedOver(Response):
    """Sends nothing: the host answers the request, whose decompressed body was read here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[HANDED_OVER] = self.body


class ClientPresence:
    """Whether the client of one connection is still there. The ASGI way, a task per request that awaits `receive`,
    costs more than the work of an /infer."""

    __slots__ = ("_callbacks", "_close", "_is_lost")

    def __init__(self, close: Callable[[], None] | None = None) -> None:
        """close: closes the connection after pending writes; None: there is none"""
        self._close = close or self.lost
        self._is_lost = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the client has disconnected, at once if it already has."""
        if self._is_lost:
            callback()
        else:
            self._callbacks.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    async def disconnect(self) -> None:
        """Closes the connection, which shows the client that the response is incomplete, and waits until it is lost."""
        self._close()
        await self.until_lost()

    async def until_lost(self) -> None:
        is_lost = asyncio.Event()
        self.when_lost(is_lost.set)
        try:
            await is_lost.wait()
        finally:
            self.forget(is_lost.set)

    def lost(self) -> None:
        self._is_lost = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def header(request: Request, name: bytes, default: str = "") -> str:
    """The value of the first header `name`, given in lower case. Faster than starlette's `request.headers`."""
    for key, value in request.scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return default


def headers_as_sent(scope: Any) -> list[tuple[bytes, bytes]]:
    """(name, value) of each header, with the client's spelling of names if the protocol kept them."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = scope.get(SENT_NAMES)
    return headers if names is None else [(name, value) for name, (_, value) in zip(names, headers, strict=True)]


T = TypeVar("T")


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect if the client leaves. Read the body before."""
    presence: ClientPresence = http.scope[PRESENCE]
    if presence.is_lost:
        work.close()
        raise ClientDisconnect
    task = asyncio.current_task()  # another task would cost more than the work of most requests
    assert task is not None
    is_cut = False

    def cut() -> None:
        nonlocal is_cut
        is_cut = True
        task.cancel()

    presence.when_lost(cut)
    try:
        return await work
    except asyncio.CancelledError:
        if is_cut and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        presence.forget(cut)


TRACEPARENT = b"traceparent"
"""Names the request's root span in the response, for clients without a trace of their own."""


def sampled(server: Host, model_name: str, request: Request, start_ns: int = 0) -> RequestTrace | None:
    """The trace of `request`, if it is sampled. start_ns: arrival of its header (monotonic; 0: now)"""
    if server.tracing.is_idle:
        return None
    trace = server.tracing.sample(model_name, request.headers.get)
    if trace is not None:
        trace.mark("HTTP_RECV_START", start_ns)
    return trace


def received(trace: RequestTrace | None) -> None:
    """To be called after the body was read."""
    if trace is not None:
        trace.mark("HTTP_RECV_END")


async def traced(trace: RequestTrace | None, answer: Coroutine[Any, Any, Response]) -> Response:
    """The response of `answer`; sending it ends the trace."""
    if trace is None:
        return await answer
    try:
        return _TracedResponse(await answer, trace)
    except BaseException:
        trace.close()
        raise


class _TracedResponse(Response):
    """Records when `response` is sent in the trace."""

    def __init__(self, response: Response, trace: RequestTrace) -> None:
        self.background = None
        self.status_code = response.status_code
        self.raw_headers = response.raw_headers
        self._response = response
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._trace.mark("HTTP_SEND_START")
        if traceparent := self._trace.trace.traceparent:
            self._response.raw_headers.append((TRACEPARENT, traceparent.encode()))
        try:
            await self._response(scope, receive, send)
        finally:
            self._trace.mark("HTTP_SEND_END")
            self._trace.close()
