"""HostRpcs: RPCs that a frontend process does not answer itself, answered by the host's gRPC server.

For: the frontend process, as its outermost interceptor. Does not know: what an RPC does or holds; the host decides
about every one that it answers. Invariants: messages are not parsed; metadata, deadline, cancellation, status with its
details and trailers are those of the one RPC on both sides; a host that is gone is UNAVAILABLE, with the time to try
again, unless this process knows the answer, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from ..errors import RETRY_AFTER_S
from ..grpc.messages import UNPARSABLE
from ..grpc.resumable import RESUMABLE, RESUME_FROM
from .host_http import HOST_IS_GONE, MODEL_STREAM_INFER, is_known_rpc, is_own_rpc

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 16 << 20),
    ("grpc.absolute_max_metadata_size", 16 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", "localhost"),
)
_OF_THE_CHANNEL: Final = frozenset({"user-agent", "content-type", "te"})
_KEPT_PARAMETERS: Final = (RESUMABLE, RESUME_FROM)
"""Of the first request of a ModelStreamInfer whose responses the host keeps."""
_IN_THEIR_NAMES: Final = b"resum"
Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[Any], Awaitable[Any]]
InItsPlace = Callable[[], Awaitable[Any]]
"""Finds this process's own handler."""
_AGAIN: Final = (("retry-after", RETRY_AFTER_S),)


class HostRpcs(grpc.aio.ServerInterceptor):
    """The outermost interceptor. `kept_streams` is the innermost one."""

    def __init__(self, socket_path: Path) -> None:
        """socket_path: where the host's gRPC server listens. To be made on the event loop."""
        self._channel = grpc.aio.insecure_channel(f"unix:{socket_path}", options=_OPTIONS)
        self.kept_streams = _KeptStreams(self.pass_on)

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if is_own_rpc(method):
            return await continuation(handler_call_details)
        in_its_place = partial(continuation, handler_call_details) if is_known_rpc(method) else None
        # A stream in both directions is on the wire what every kind of RPC is.
        return grpc.stream_stream_rpc_method_handler(partial(self._pass_on_one, method, in_its_place))

    async def close(self) -> None:
        await self._channel.close()

    async def _pass_on_one(
        self, method: str, in_its_place: InItsPlace | None, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        """An RPC with one request, which goes out in one piece: a host that refuses it before it has read it does not
        make the sending fail."""
        async for request in requests:
            start: Any = self._channel.unary_stream(method)
            here = None if in_its_place is None else partial(_answer_here, in_its_place, request, context)
            return await self._answer(partial(start, request), context, here)
        await context.abort(grpc.StatusCode.INTERNAL, UNPARSABLE)

    async def pass_on(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        """An RPC with a stream of requests."""
        start: Any = self._channel.stream_stream(method)
        await self._answer(partial(start, requests), context)

    async def _answer(
        self, start: Callable[..., Any], context: Context, here: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """here: answers in the place of a host that is gone"""
        metadata = [
            pair
            for pair in context.invocation_metadata() or ()
            if pair[0] not in _OF_THE_CHANNEL and not pair[0].startswith(("grpc-", ":"))
        ]
        call = start(timeout=context.time_remaining(), metadata=metadata)
        has_begun = False
        try:
            await context.send_initial_metadata(await call.initial_metadata() or ())
            async for message in call:
                has_begun = True
                await context.write(message)
            context.set_trailing_metadata(await call.trailing_metadata() or ())
        except grpc.aio.AioRpcError as error:
            if not self._is_gone(error):
                await context.abort(error.code(), error.details() or "", error.trailing_metadata() or ())
            elif here is None or has_begun:
                await context.abort(grpc.StatusCode.UNAVAILABLE, HOST_IS_GONE, _AGAIN)
            else:
                await here()
        finally:
            call.cancel()

    def _is_gone(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether the host ended, rather than saying so itself."""
        is_connected = self._channel.get_state() is grpc.ChannelConnectivity.READY
        return error.code() is grpc.StatusCode.UNAVAILABLE and not is_connected


async def _answer_here(find: InItsPlace, request: bytes, context: Context) -> None:
    """An RPC with one request and one response, by this process's own handler, or the refusal of access control."""
    handler = await find()
    if handler.unary_unary is None:
        await handler.stream_stream(None, context)
        return
    response = await handler.unary_unary(handler.request_deserializer(request), context)
    await context.write(handler.response_serializer(response))


class _KeptStreams(grpc.aio.ServerInterceptor):
    """Passes a ModelStreamInfer on whose first request asks the host to keep its responses, or for such responses. It
    is behind access control, so that a call that is refused ends before a message is read."""

    def __init__(self, pass_on: Callable[[str, AsyncIterator[bytes], Context], Awaitable[None]]) -> None:
        self._pass_on = pass_on

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler_call_details.method != MODEL_STREAM_INFER or handler is None:
            return handler

        async def stream(requests: AsyncIterator[bytes], context: Context) -> None:
            first = [request async for request in _first_of(requests)]
            together = _chained(first, requests)
            if first and _is_kept(first[0]):
                await self._pass_on(MODEL_STREAM_INFER, together, context)
            else:
                await handler.stream_stream(_parsed(handler.request_deserializer, together), context)

        return handler._replace(stream_stream=stream, request_deserializer=None)


def _is_kept(request: bytes) -> bool:
    if _IN_THEIR_NAMES not in request:
        return False
    try:
        parameters = pb.ModelInferRequest.FromString(request).parameters
    except DecodeError:
        return False
    return any(name in parameters for name in _KEPT_PARAMETERS)


async def _first_of(requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request
        return


async def _chained(first: list[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for request in first:
        yield request
    async for request in rest:
        yield request


async def _parsed(parse: Callable[[bytes], Any], requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for request in requests:
        yield parse(request)
