"""HostApplication: what a frontend process does not answer itself, answered by the host's HTTP application.

For: the frontend process. Does not know: paths, keys; the host decides about every request that it answers. Invariants:
bodies go both ways as they come, and of each no more than a piece is held; a client that leaves ends its request at the
host; a host that is gone is a 503, unless this process knows the answer, too, and within a response the end of the
client's connection. Each request has a connection of its own: on a unix socket one costs less than a tenth of a
millisecond, and none is ever found closed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.errors import refusing
from ..http.request_scope import PRESENCE, ClientPresence, headers_as_sent
from ..http.responses import HOP_BY_HOP, ForwardedResponse

MODEL_STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
_RPCS: Final = frozenset({"/inference.GRPCInferenceService/ModelInfer", MODEL_STREAM_INFER})
_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages"})
_MODEL_PREFIX: Final = "/v2/models/"
_MODEL_WORDS: Final = frozenset({"infer", "generate", "generate_stream"})
_KNOWN_RPCS: Final = frozenset(
    {f"/inference.GRPCInferenceService/{name}" for name in ("ServerLive", "ServerReady", "ModelReady")}
    | {f"/inference.GRPCInferenceService/{name}" for name in ("ServerMetadata", "ModelMetadata")}
    | {"/grpc.health.v1.Health/Check"}
)
_KNOWN_PATHS: Final = frozenset({"/v2", "/v2/health/live", "/v2/health/ready", "/health", "/health/ready", "/ping"})
_KNOWN_MODEL: Final = re.compile(r"/v2/models/(?!stats$)[^/]+(/versions/[^/]+)?(/ready)?|/v1/models(/.+)?")
_KEPT: Final = frozenset({b"x-resumable-stream", b"last-event-id", b"idempotency-key"})


def is_own_request(scope: Scope) -> bool:
    """Whether a request over HTTP is answered in this process."""
    if scope["method"] != "POST":
        return False
    path: str = scope["path"]
    if path not in _PATHS and not (path.startswith(_MODEL_PREFIX) and path.rpartition("/")[2] in _MODEL_WORDS):
        return False
    return all(name not in _KEPT for name, _ in scope["headers"])


def is_own_rpc(method: str) -> bool:
    """Whether an RPC is answered in this process, if it keeps nothing. method: as gRPC names it, `/service/name`."""
    return method in _RPCS


def is_known_request(scope: Scope) -> bool:
    """Whether a request over HTTP can be answered here in the place of a host that is away."""
    path: str = scope["path"]
    return scope["method"] == "GET" and (path in _KNOWN_PATHS or _KNOWN_MODEL.fullmatch(path) is not None)


def is_known_rpc(method: str) -> bool:
    """The same of an RPC, which has one request and one response."""
    return method in _KNOWN_RPCS


CLIENT_ADDRESS: Final = b"x-llmbackend-client-address"


def address_header(scope: Scope) -> tuple[bytes, bytes]:
    """The header that tells the host who sent the request of `scope`."""
    address, port = scope.get("client") or ("", 0)
    return CLIENT_ADDRESS, f"{address} {port}".encode()


def from_frontends(app: ASGIApp) -> ASGIApp:
    """`app`, for requests that frontend processes pass on: it sees their clients' addresses."""

    async def addressed(scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"]
        told = next((value for name, value in headers if name == CLIENT_ADDRESS), b"")
        address, _, port = told.decode("latin-1").rpartition(" ")
        if address:
            scope["client"] = (address, int(port))
        scope["headers"] = [pair for pair in headers if pair[0] != CLIENT_ADDRESS]
        await app(scope, receive, send)

    return addressed


log = logging.getLogger(__name__)
P = TypeVar("P", bound=asyncio.BaseProtocol)

HOST_IS_GONE: Final = "the server process behind this frontend cannot be reached"
_REFUSING: Final = refusing(503, HOST_IS_GONE)
_PIECE_BYTES: Final = 64 << 10
_NOT_PASSED_ON: Final = HOP_BY_HOP | {CLIENT_ADDRESS, b"expect", b"te", b"trailer", b"proxy-connection"}


class HostApplication:
    """An ASGI application, and where websockets go (see `Tunnels`)."""

    def __init__(self, socket_path: Path, websocket_path: str = "") -> None:
        """socket_path: where the host's application listens. websocket_path: beginning of the targets of its
        websockets, "" where it has none."""
        self._path = str(socket_path)
        self._websocket_path = websocket_path.encode()

    def behind(self, app: ASGIApp) -> ASGIApp:
        """`app` for its own requests, the host's application for all others; `app` in the place of a host that is
        away, for what it knows."""

        async def dispatched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or is_own_request(scope):
                await app(scope, receive, send)
            else:
                await self._pass_on(scope, receive, send, app if is_known_request(scope) else _REFUSING)

        return dispatched

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._pass_on(scope, receive, send, _REFUSING)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, in_its_place: ASGIApp) -> None:
        """in_its_place: answers where the host is away"""
        response = ForwardedResponse(send, has_body=scope["method"] != "HEAD")
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=_PIECE_BYTES)
            await self._exchange(scope, receive, response, reader, writer)
        except (OSError, httptools.HttpParserError) as error:
            presence: ClientPresence = scope[PRESENCE]
            if presence.is_lost:
                return
            if in_its_place is _REFUSING or response.has_begun:
                log.warning("%s: %s", HOST_IS_GONE, error)
            if response.has_begun:
                await presence.disconnect()
                return
            await in_its_place(scope, receive, send)

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
        """Never one: the host refuses by itself."""
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
    """Sends the request. Where the client's part of the body ends too early, or the host reads no more, the response
    tells."""
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


def _head(scope: Scope, is_chunked: bool) -> bytes:
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [b"%b: %b" % pair for pair in headers_as_sent(scope) if pair[0].lower() not in _NOT_PASSED_ON]
    lines += [b"%b: %b" % address_header(scope), b"connection: close"]
    lines += [b"transfer-encoding: chunked"] if is_chunked else []
    return b"\r\n".join((*lines, b"", b""))
