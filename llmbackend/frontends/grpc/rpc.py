"""What all RPC handlers share: how they end when they raise, and the times that they add to a request's trace.

For: the gRPC servicers and streams. Does not know: RPCs, models, where traces are written. Invariant: a TritonError
becomes the status of its code with its text unchanged; a bug of ours is logged, and reported without detail.
Source: Triton's grpc_utils; GRPC_WAITREAD_START … GRPC_SEND_END of Triton's grpc server (messages are read before a
handler sees them, so here the reading ends when the handler starts).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import grpc

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.host_protocol import Host
from llmbackend.core.tracing.trace import RequestTrace

from ..errors import LimitReachedError, PermissionDeniedError, log_bug

INTERNAL_ERROR: Final = "internal error, see the server's log"

GRPC_STATUS: Final[Mapping[ErrorCode, grpc.StatusCode]] = {
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
}
Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])
Context = grpc.aio.ServicerContext[Any, Any]


def grpc_status(error: TritonError) -> grpc.StatusCode:
    """The status of a call that ends with `error`."""
    if isinstance(error, LimitReachedError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, PermissionDeniedError):
        return grpc.StatusCode.PERMISSION_DENIED
    return GRPC_STATUS[error.code]


def grpc_trailers(error: TritonError) -> tuple[tuple[str, str], ...]:
    """Metadata sent with the status: when to try again."""
    return (("retry-after", error.retry_after),) if isinstance(error, LimitReachedError) else ()


def rpc(handler: Handler) -> Handler:
    """`handler(self, request, context)` as an RPC whose exceptions become its status."""

    @functools.wraps(handler)
    async def guarded(self: Any, request: Any, context: Any) -> Any:
        try:
            return await handler(self, request, context)
        except TritonError as error:
            await context.abort(grpc_status(error), error.message, grpc_trailers(error))
        except Exception as error:
            log_bug(f"{handler.__name__} failed", error)
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_ERROR)

    return guarded  # type: ignore[return-value]


def sampled(server: Host, model_name: str, context: Context, start_ns: int = 0) -> RequestTrace | None:
    """The trace of a request, if it is sampled. `start_ns`: when the wait for it began (monotonic; 0: now)."""
    if server.tracing.is_idle:
        return None
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    trace = server.tracing.sample(model_name, metadata.get)
    if trace is not None:
        now_ns = time.monotonic_ns()
        trace.mark("GRPC_WAITREAD_START", start_ns or now_ns)
        trace.mark("GRPC_WAITREAD_END", now_ns)
    return trace


async def name_trace(trace: RequestTrace, context: Context) -> None:
    """Tells the client of an RPC with one response the name of its trace."""
    if traceparent := trace.trace.traceparent:
        await context.send_initial_metadata((("traceparent", traceparent),))


def close_when_sent(trace: RequestTrace, context: Context) -> None:
    """For an RPC with one response: the end of the call ends the trace."""

    def sent(_: Any) -> None:
        trace.mark("GRPC_SEND_END")
        trace.close()

    context.add_done_callback(sent)  # type: ignore[arg-type]  # it is called with the context alone
