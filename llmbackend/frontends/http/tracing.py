"""What an HTTP request adds to its trace, if it has one: when it was received, and when its response was sent.

For: handlers of inference. Does not know: models, where traces are written. Invariants: a request without a trace costs
nothing more; one with a trace closes it, however its handler or its response ends.
Source: HTTP_RECV_START … HTTP_SEND_END of Triton's http_server (golden 60), which gives the sending of a stream the
time 0.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmbackend.core.host_protocol import Host
from llmbackend.core.tracing.trace import RequestTrace

TRACEPARENT = b"traceparent"
"""Names the request's root span in the response, so that a client without a trace of its own finds it."""


def sampled(server: Host, model_name: str, request: Request, start_ns: int = 0) -> RequestTrace | None:
    """The trace of `request`, if it is sampled. `start_ns`: when its header came (monotonic; 0: now)."""
    if server.tracing.is_idle:
        return None
    trace = server.tracing.sample(model_name, request.headers.get)
    if trace is not None:
        trace.mark("HTTP_RECV_START", start_ns)
    return trace


def received(trace: RequestTrace | None) -> None:
    """To be called when the body has been read."""
    if trace is not None:
        trace.mark("HTTP_RECV_END")


async def traced(trace: RequestTrace | None, answer: Coroutine[Any, Any, Response]) -> Response:
    """The response of the handler `answer`; sending it ends the trace."""
    if trace is None:
        return await answer
    try:
        return _TracedResponse(await answer, trace)
    except BaseException:
        trace.close()
        raise


class _TracedResponse(Response):
    """Another response; the times of its sending go to the trace."""

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
