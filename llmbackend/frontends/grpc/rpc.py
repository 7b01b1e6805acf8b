"""Shared by all RPCs: error statuses, trace timestamps, and writing of streams.

Invariant: a TritonError becomes the status of its code with its text; an internal error is logged, and reported without
details. Sources: Triton's grpc_utils; GRPC_WAITREAD_START … GRPC_SEND_END of Triton's grpc server (here, reading ends
when the handler starts, because grpc.aio reads the message before).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

import grpc

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.host_protocol import Host
from llmbackend.core.tracing.trace import RequestTrace

from ..errors import LimitReachedError, PermissionDeniedError, UnauthenticatedError, log_bug

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
    if isinstance(error, LimitReachedError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, PermissionDeniedError):
        return grpc.StatusCode.PERMISSION_DENIED
    if isinstance(error, UnauthenticatedError):
        return grpc.StatusCode.UNAUTHENTICATED
    return GRPC_STATUS[error.code]


def rpc(handler: Handler) -> Handler:
    """`handler(self, request, context)` as an RPC whose exceptions become its status."""

    @functools.wraps(handler)
    async def guarded(self: Any, request: Any, context: Any) -> Any:
        try:
            return await handler(self, request, context)
        except TritonError as error:
            trailers = (("retry-after", error.retry_after),) if isinstance(error, LimitReachedError) else ()
            await context.abort(grpc_status(error), error.message, trailers)
        except Exception as error:
            log_bug(f"{handler.__name__} failed", error)
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_ERROR)

    return guarded  # type: ignore[return-value]


def sampled(server: Host, model_name: str, context: Context, start_ns: int = 0) -> RequestTrace | None:
    """The trace of a request, if it is sampled. start_ns: when the server began to wait for it (monotonic; 0: now)"""
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
    """Sends the trace's name to the client of a unary RPC."""
    if traceparent := trace.trace.traceparent:
        await context.send_initial_metadata((("traceparent", traceparent),))


def close_when_sent(trace: RequestTrace, context: Context) -> None:
    """Ends the trace at the end of a unary RPC."""

    def sent(_: Any) -> None:
        trace.mark("GRPC_SEND_END")
        trace.close()

    context.add_done_callback(sent)  # type: ignore[arg-type]  # it is called with the context alone


class StreamWriter:
    """Writes the messages of one stream. Used on the event loop.

    Drives gRPC's write coroutines as a task would: `send` runs one up to the future that it awaits. Raises nothing:
    `on_failure` gets the exception if the call has ended or a write fails, and `on_stall` is called if the client reads
    nothing for `timeout_s`; nothing is written afterwards.
    """

    def __init__(
        self,
        context: Context,
        timeout_s: float,
        on_failure: Callable[[BaseException], object],
        on_stall: Callable[[], object],
    ) -> None:
        self._context = context
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._write: Coroutine[Any, Any, None] | None = None
        self._future: asyncio.Future[Any] | None = None
        """What the write in progress awaits."""
        self._when_free: list[Callable[[], object]] = []
        self._began_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def is_free(self) -> bool:
        """Whether `write` may be called: no write is in progress, none has failed."""
        if self._future is not None and self._future.done():
            self._advance()
        return self._write is None and not self._is_closed

    def write(self, message: bytes) -> None:
        self._write = self._context.write(message)
        self._advance()
        self._began_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._check_progress)

    def when_free(self, callback: Callable[[], object]) -> None:
        """Calls back once, as soon as no write is in progress."""
        if self.is_free:
            callback()
        elif not self._is_closed:
            if not self._when_free and self._future is not None:
                self._future.add_done_callback(self._ended)
            self._when_free.append(callback)

    async def idle(self) -> None:
        """Waits for the end of the write in progress."""
        while not self.is_free and self._future is not None:
            await asyncio.wait([self._future])

    def close(self) -> None:
        """Drops the write in progress, and the callbacks, which refer to its owner. Idempotent."""
        self._is_closed = True
        self._on_failure = self._on_stall = _nothing
        self._when_free.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._future is not None:
            self._future.cancel()
        if self._write is not None:
            self._write.close()
        self._write = self._future = None

    def _advance(self) -> None:
        """Runs the write up to the next future that it awaits, or to its end."""
        assert self._write is not None
        try:
            future = self._write.send(None)
        except StopIteration:
            self._write = self._future = None
        except (Exception, asyncio.CancelledError) as error:
            self._write = self._future = None
            on_failure = self._on_failure
            self.close()
            on_failure(error)
        else:
            future._asyncio_future_blocking = False  # as a task that awaits it does
            self._future = future

    def _ended(self, _: asyncio.Future[Any]) -> None:
        callbacks, self._when_free = self._when_free, []
        for callback in callbacks:
            self.when_free(callback)

    def _check_progress(self) -> None:
        self._timer = None
        if self.is_free or self._is_closed:
            return
        left_s = self._began_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_progress)
        else:
            self._on_stall()


def _nothing(*_: object) -> None:
    """A callback that does nothing."""
