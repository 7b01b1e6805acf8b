"""Forwards requests that a frontend process does not answer itself to its host's HTTP application and gRPC server.

Independent of API keys, of what an RPC does and of how either side is started. Invariants: bodies and messages are
forwarded piece by piece in both directions, as are metadata, deadlines, cancellation, statuses with their details, and
trailers. A client disconnect ends the request at the host. If the host is gone, the client gets 503 or UNAVAILABLE
(unless this process can answer), or its connection is closed if the response has begun. Each HTTP request opens its own
connection: on a unix socket that takes less than 0.1 ms, and stale connections cannot occur.
"""

from __future__ import annotations

import asyncio
import logging
import re
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import grpc
import httptools
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tritonclient.grpc import service_pb2 as pb

from .errors import RETRY_AFTER_S
from .grpc.messages import LENGTH, MAX_FIELDS, UNPARSABLE, fields
from .grpc.resumable import RESUMABLE, RESUME_FROM
from .http.errors import refusing
from .http.request_scope import HANDED_OVER, IS_COUNTED, PRESENCE, SENT_NAMES, ClientPresence, headers_as_sent
from .http.responses import HOP_BY_HOP, ForwardedResponse
from .http.tunnel import Tunnels

MODEL_STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_RPCS: Final = frozenset({"/inference.GRPCInferenceService/ModelInfer", MODEL_STREAM_INFER})
_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/invocations"})
_MODEL_PREFIX: Final = "/v2/models/"
_MODEL_WORDS: Final = frozenset({"infer", "generate", "generate_stream"})
_KNOWN_RPCS: Final = frozenset(
    f"/inference.GRPCInferenceService/{name}"
    for name in ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata")
) | {"/grpc.health.v1.Health/Check"}
_KNOWN_PATHS: Final = frozenset({"/v2", "/v2/health/live", "/v2/health/ready", "/health", "/health/ready", "/ping"})
_KNOWN_MODEL: Final = re.compile(r"/v2/models/(?!stats$)[^/]+(/versions/[^/]+)?(/ready)?|/v1/models(/.+)?")
_KEPT: Final = frozenset({b"x-resumable-stream", b"last-event-id", b"idempotency-key"})


def is_own_request(scope: Scope) -> bool:
    """Whether this process answers an HTTP request itself."""
    if scope["method"] != "POST":
        return False
    path: str = scope["path"]
    if path not in _PATHS and not (path.startswith(_MODEL_PREFIX) and path.rpartition("/")[2] in _MODEL_WORDS):
        return False
    return all(name not in _KEPT for name, _ in scope["headers"])


def is_known_request(scope: Scope) -> bool:
    """Whether this process can answer an HTTP request while the host is down."""
    path: str = scope["path"]
    return scope["method"] == "GET" and (path in _KNOWN_PATHS or _KNOWN_MODEL.fullmatch(path) is not None)


CLIENT_ADDRESS: Final = b"x-llmbackend-client-address"
WAS_HANDED_OVER: Final = b"x-llmbackend-was-handed-over"
_OWN: Final = frozenset({CLIENT_ADDRESS, WAS_HANDED_OVER})
"""Headers between these processes only."""


def from_frontends(app: ASGIApp) -> ASGIApp:
    """Wraps `app` for requests forwarded by frontend processes, so that it sees the original client addresses."""

    async def addressed(scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        value = next((value for name, value in headers if name == CLIENT_ADDRESS), b"")
        address, _, port = value.decode("latin-1").rpartition(" ")
        if address:
            scope["client"] = (address, int(port))
        scope[IS_COUNTED] = any(name == WAS_HANDED_OVER for name, _ in headers)
        scope["headers"] = [pair for pair in headers if pair[0] not in _OWN]
        await app(scope, receive, send)

    return addressed


log = logging.getLogger(__name__)
P = TypeVar("P", bound=asyncio.BaseProtocol)
HOST_IS_GONE: Final = "the server process behind this frontend cannot be reached"
_REFUSING: Final = refusing(503, HOST_IS_GONE)
_PIECE_BYTES: Final = 64 << 10
_NOT_FORWARDED: Final = HOP_BY_HOP | _OWN | {b"expect", b"te", b"trailer", b"proxy-connection"}


class HostApplication:
    """The host's HTTP application, as an ASGI application and as the target of websockets (see `Tunnels`)."""

    def __init__(self, socket_path: Path, websocket_path: str = "") -> None:
        """socket_path: the socket of the host's application
        websocket_path: prefix of the host's websocket targets; "": no websockets
        """
        self._path = str(socket_path)
        self._websocket_path = websocket_path.encode()

    def route(self, app: ASGIApp) -> ASGIApp:
        """Routes `app`'s own requests, and those it can answer while the host is down, to `app`; others to the host."""

        async def dispatched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
            elif is_own_request(scope):
                scope[HANDED_OVER] = None
                await app(scope, receive, send)
                if (body := scope[HANDED_OVER]) is not None:
                    await self._forward(_with_body(scope, body), _receiving(body), send, _REFUSING)
            else:
                await self._forward(scope, receive, send, app if is_known_request(scope) else _REFUSING)

        return dispatched

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._forward(scope, receive, send, _REFUSING)

    async def _forward(self, scope: Scope, receive: Receive, send: Send, fallback: ASGIApp) -> None:
        """fallback: answers while the host is down"""
        response = ForwardedResponse(send, has_body=scope["method"] != "HEAD")
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=_PIECE_BYTES)
            await self._exchange(scope, receive, response, reader, writer)
        except (OSError, httptools.HttpParserError) as error:
            presence: ClientPresence = scope[PRESENCE]
            if presence.is_lost:
                return
            if fallback is _REFUSING or response.has_begun:
                log.warning("%s: %s", HOST_IS_GONE, error)
            if response.has_begun:
                await presence.disconnect()
                return
            await fallback(scope, receive, send)

    async def _exchange(
        self, scope: Scope, receive: Receive, response: ForwardedResponse, reader: StreamReader, writer: StreamWriter
    ) -> None:
        presence: ClientPresence = scope[PRESENCE]
        abort = writer.transport.abort
        presence.when_lost(abort)
        sending = asyncio.create_task(_send_request(scope, receive, writer))
        try:
            while not response.is_complete:
                await response.take(await reader.read(_PIECE_BYTES))
        finally:
            presence.forget(abort)
            sending.cancel()
            abort()

    # --- websockets -------------------------------------------------------------------------------------------------

    def takes_websocket(self, target: bytes) -> bool:
        return bool(self._websocket_path) and target.startswith(self._websocket_path)

    def websocket_refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Always "": the host checks websocket requests itself."""
        return ""

    async def connect(self, make_protocol: Callable[[], P]) -> P:
        try:
            _, protocol = await asyncio.get_running_loop().create_unix_connection(make_protocol, self._path)
        except OSError:
            raise ConnectionError(HOST_IS_GONE) from None
        return protocol

    def left(self) -> None:
        """Nothing is counted here."""


async def _send_request(scope: Scope, receive: Receive, writer: StreamWriter) -> None:
    """Does not raise if the body ends early or the host stops reading; the response reports it."""
    names = {name for name, _ in scope["headers"]}
    is_chunked = b"content-length" not in names and b"transfer-encoding" in names
    writer.write(_head(scope, is_chunked))
    try:
        await writer.drain()
        if is_chunked or b"content-length" in names:
            await _send_body(receive, writer, is_chunked)
    except ConnectionError:
        return


async def _send_body(receive: Receive, writer: StreamWriter, is_chunked: bool) -> None:
    is_more = True
    while is_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            writer.transport.abort()
            return
        is_more = message.get("more_body", False)
        piece = message.get("body", b"")
        if piece:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
        if is_chunked and not is_more:
            writer.write(b"0\r\n\r\n")
        await writer.drain()


_OF_BODY: Final = frozenset({b"content-length", b"content-encoding", b"transfer-encoding"})


def _with_body(scope: Scope, body: bytes) -> Scope:
    headers = [pair for pair in headers_as_sent(scope) if pair[0].lower() not in _OF_BODY]
    handed_over = {**scope, "headers": [*headers, (b"content-length", b"%d" % len(body))]}
    handed_over.pop(SENT_NAMES, None)
    return handed_over


def _receiving(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


def _head(scope: Scope, is_chunked: bool) -> bytes:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [b"%b: %b" % pair for pair in headers_as_sent(scope) if pair[0].lower() not in _NOT_FORWARDED]
    address, port = scope.get("client") or ("", 0)
    lines += [b"%b: %b" % (CLIENT_ADDRESS, f"{address} {port}".encode()), b"connection: close"]
    lines += [b"%b: 1" % WAS_HANDED_OVER] if scope.get(HANDED_OVER) is not None else []
    lines += [b"transfer-encoding: chunked"] if is_chunked else []
    return b"\r\n".join((*lines, b"", b""))


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
_KEPT_PARAMETERS: Final = frozenset({RESUMABLE.encode(), RESUME_FROM.encode()})
"""Parameters in the first request of a ModelStreamInfer whose responses the host retains."""
_PARAMETERS: Final = pb.ModelInferRequest.DESCRIPTOR.fields_by_name["parameters"].number
_KEY: Final = 1
"""Of a map's entries, in the protobuf wire format."""
_COMMON_NAME_PART: Final = b"resum"
Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[Any], Awaitable[Any]]
FindHandler = Callable[[], Awaitable[Any]]
"""Finds this process's own handler."""
_RETRY_AFTER: Final = (("retry-after", RETRY_AFTER_S),)


class HostRpcs(grpc.aio.ServerInterceptor):
    """Forwards RPCs; the outermost interceptor. `kept_streams` is the innermost one."""

    def __init__(self, socket_path: Path) -> None:
        """socket_path: the socket of the host's gRPC server. Must be called on the event loop."""
        self._channel = grpc.aio.insecure_channel(f"unix:{socket_path}", options=_OPTIONS)
        self.kept_streams = _KeptStreams(self._forward_stream)

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method in _RPCS:
            return await continuation(handler_call_details)
        find_handler = partial(continuation, handler_call_details) if method in _KNOWN_RPCS else None
        # On the wire, every kind of RPC is a bidirectional stream.
        return grpc.stream_stream_rpc_method_handler(partial(self._forward_one, method, find_handler))

    async def close(self) -> None:
        await self._channel.close()

    async def _forward_one(
        self, method: str, find_handler: FindHandler | None, requests: AsyncIterator[bytes], context: Context
    ) -> None:
        """Forwards a one-request RPC in one piece, so that sending does not fail if the host refuses it unread."""
        async for request in requests:
            start: Any = self._channel.unary_stream(method)
            fallback = None if find_handler is None else partial(_answer_here, find_handler, request, context)
            return await self._answer(partial(start, request), context, fallback)
        await context.abort(grpc.StatusCode.INTERNAL, UNPARSABLE)

    async def _forward_stream(self, method: str, requests: AsyncIterator[bytes], context: Context) -> None:
        start: Any = self._channel.stream_stream(method)
        await self._answer(partial(start, requests), context)

    async def _answer(
        self, start: Callable[..., Any], context: Context, fallback: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """fallback: answers while the host is down"""
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
            elif fallback is None or has_begun:
                await context.abort(grpc.StatusCode.UNAVAILABLE, HOST_IS_GONE, _RETRY_AFTER)
            else:
                await fallback()
        finally:
            call.cancel()

    def _is_gone(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether the host is down; a running host may also answer UNAVAILABLE."""
        is_connected = self._channel.get_state() is grpc.ChannelConnectivity.READY
        return error.code() is grpc.StatusCode.UNAVAILABLE and not is_connected


async def _answer_here(find_handler: FindHandler, request: bytes, context: Context) -> None:
    """Answers a unary RPC with this process's handler, or with the refusal of access control."""
    handler = await find_handler()
    if handler.unary_unary is None:
        await handler.stream_stream(None, context)
        return
    response = await handler.unary_unary(handler.request_deserializer(request), context)
    await context.write(handler.response_serializer(response))


class _KeptStreams(grpc.aio.ServerInterceptor):
    """Forwards a ModelStreamInfer whose first request asks for a resumable stream or resumes one. Runs after access
    control, so that a refused call ends before a message is read."""

    def __init__(self, forward: Callable[[str, AsyncIterator[bytes], Context], Awaitable[None]]) -> None:
        self._forward = forward

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler_call_details.method != MODEL_STREAM_INFER or handler is None:
            return handler

        async def stream(requests: AsyncIterator[bytes], context: Context) -> None:
            incoming = aiter(requests)
            first = await anext(incoming, None)
            together = _chained(first, incoming)
            if first is not None and is_kept_stream(first):
                await self._forward(MODEL_STREAM_INFER, together, context)
            else:
                parsed = (handler.request_deserializer(request) async for request in together)
                await handler.stream_stream(parsed, context)

        return handler._replace(stream_stream=stream, request_deserializer=None)


def is_kept_stream(request: bytes) -> bool:
    """Whether the first message of a ModelStreamInfer has one of _KEPT_PARAMETERS. Takes time proportional to the
    number of its fields; those beyond MAX_FIELDS are not read, since such a request is refused."""
    if _COMMON_NAME_PART not in request:
        return False
    try:
        return any(bytes(name) in _KEPT_PARAMETERS for name in _parameter_names(memoryview(request)))
    except DecodeError:
        return False


def _parameter_names(request: memoryview) -> Iterator[memoryview]:
    """Raises DecodeError."""
    for parameter in islice(fields(request), MAX_FIELDS):
        if (parameter.number, parameter.kind) == (_PARAMETERS, LENGTH):
            for part in islice(fields(request[parameter.value : parameter.end]), 2):
                if (part.number, part.kind) == (_KEY, LENGTH):
                    yield request[parameter.value + part.value : parameter.value + part.end]


async def _chained(first: bytes | None, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first is not None:
        yield first
    async for request in rest:
        yield request


Announce = Callable[[], Awaitable[object]]
"""Returns once every frontend process has the host's current models and settings."""
_CHANGING_PATHS: Final = ("/v2/repository/models/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_TRACE_SETTING: Final = "/trace/setting"
_CHANGING_RPCS: Final = frozenset(
    f"/inference.GRPCInferenceService/{name}"
    for name in ("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting")
)


def announcing(app: ASGIApp, announce: Announce) -> ASGIApp:
    """Wraps `app`: responses to changes begin only when every frontend process has them."""

    async def known(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_known(message: Message) -> None:
            if message["type"] == "http.response.start":
                await announce()
            await send(message)

        await app(scope, receive, send_known if _changes(scope) else send)

    return known


def _changes(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and (path.startswith(_CHANGING_PATHS) or path.endswith(_TRACE_SETTING))


class AnnouncingRpcs(grpc.aio.ServerInterceptor):
    """The same for RPCs."""

    def __init__(self, announce: Announce) -> None:
        self._announce = announce

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler_call_details.method not in _CHANGING_RPCS or handler is None or handler.unary_unary is None:
            return handler

        async def known(request: Any, context: Any) -> Any:
            try:
                return await handler.unary_unary(request, context)
            finally:
                await self._announce()

        return handler._replace(unary_unary=known)


class Edge(Protocol):
    """How a server with several processes wraps its frontends."""

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Wraps the application that serves connections. app: includes access control"""

    def tunnels(self, pages: Tunnels | None) -> Tunnels | None:
        """Where websockets are forwarded. pages: the tunnels of this process"""

    def interceptors(self, access: Sequence[grpc.aio.ServerInterceptor]) -> Sequence[grpc.aio.ServerInterceptor]:
        """The interceptors of the gRPC server, outermost first; called on the event loop. access: access control's"""

    async def close(self) -> None: ...


class FrontendEdge:
    def __init__(self, http_socket: Path, grpc_socket: Path, websocket_path: str) -> None:
        self._application = HostApplication(http_socket, websocket_path)
        self._grpc_socket = grpc_socket
        self._rpcs: HostRpcs | None = None

    def wrap(self, app: ASGIApp) -> ASGIApp:
        return self._application.route(app)

    def tunnels(self, pages: Tunnels | None) -> Tunnels:
        return self._application

    def interceptors(self, access: Sequence[grpc.aio.ServerInterceptor]) -> Sequence[grpc.aio.ServerInterceptor]:
        self._rpcs = HostRpcs(self._grpc_socket)
        return (self._rpcs, *access, self._rpcs.kept_streams)

    async def close(self) -> None:
        if self._rpcs is not None:
            await self._rpcs.close()


class HostEdge:
    """The edge of a host that receives its requests from frontend processes."""

    def __init__(self, announce: Announce) -> None:
        self._announce = announce

    def wrap(self, app: ASGIApp) -> ASGIApp:
        return from_frontends(announcing(app, self._announce))

    def tunnels(self, pages: Tunnels | None) -> Tunnels | None:
        return pages

    def interceptors(self, access: Sequence[grpc.aio.ServerInterceptor]) -> Sequence[grpc.aio.ServerInterceptor]:
        return (*access, AnnouncingRpcs(self._announce))

    async def close(self) -> None:
        """Nothing to close."""
