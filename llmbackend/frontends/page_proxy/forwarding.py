"""PageProxy: answers browsers' requests for pages from the page process, in front of the HTTP application.

For: the frontend server. Does not know: what a page holds. Invariants: only GET and HEAD without a body are forwarded,
and only to the page process; of a response one piece of its socket is held at a time; a response that does not begin
in time is a 504; every other request goes to the application untouched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Final, TypeVar

import httptools
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..http.forwarded_response import HOP_BY_HOP, ForwardedResponse
from ..http.site_check import SiteCheck
from .page_paths import WEBSOCKET_PATH, is_for_pages
from .page_process import PageProcess, PagesUnavailableError
from .settings import PageSettings

P = TypeVar("P", bound=asyncio.BaseProtocol)

_HEAD_TIMEOUT_S: Final = 60.0
_PIECE_BYTES: Final = 64 << 10
_SENT: Final = frozenset(
    {b"host", b"accept", b"accept-encoding", b"accept-language", b"user-agent", b"if-none-match", b"if-modified-since"}
)
_DROPPED: Final = HOP_BY_HOP | {b"date", b"server"}


class PageProxy:
    """Owns the page process. `around` an application it is an application."""

    def __init__(self, settings: PageSettings, sites: SiteCheck) -> None:
        """sites: by its names alone are pages served, and to no other site."""
        self.process = PageProcess(settings.idle_timeout_s)
        self._sites = sites

    def around(self, app: ASGIApp) -> ASGIApp:
        async def dispatched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and _is_forwarded(scope):
                await self._forward(scope, receive, send)
            else:
                await app(scope, receive, send)

        return dispatched

    def takes_websocket(self, target: bytes) -> bool:
        """Whether a websocket that a client asks for at `target` is one of the pages."""
        return target.startswith(WEBSOCKET_PATH.encode())

    def websocket_refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Why a websocket is refused, "" if it is not. A browser always names the Origin of a websocket."""
        pairs = list(headers)
        if not any(name == b"origin" for name, _ in pairs):
            return "the request has no Origin, expected that of the pages"
        return self._site_refusal(pairs)

    def _site_refusal(self, headers: Collection[tuple[bytes, bytes]]) -> str:
        return self._sites.host_refusal(headers) or self._sites.refusal("GET", headers)

    async def connect(self, make_protocol: Callable[[], P]) -> P:
        return await self.process.connect(make_protocol)

    def left(self) -> None:
        self.process.left()

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if message := self._site_refusal(scope["headers"]):
            return await PlainTextResponse(message, 403)(scope, receive, send)
        response = ForwardedResponse(send, dropped=_DROPPED)
        try:
            try:
                await self._exchange(scope, response)
            except ConnectionError:  # the process was about to end when it was asked: the next one is asked
                if response.has_begun:
                    raise
                response = ForwardedResponse(send, dropped=_DROPPED)
                await self._exchange(scope, response)
        except (PagesUnavailableError, OSError, TimeoutError, httptools.HttpParserError) as error:
            if response.has_begun:
                raise ConnectionError("the page process ended within a response") from error
            await _unavailable(error)(scope, receive, send)

    async def _exchange(self, scope: Scope, response: ForwardedResponse) -> None:
        reader = asyncio.StreamReader(limit=_PIECE_BYTES)
        protocol = await self.process.connect(lambda: _Connection(reader))
        try:
            protocol.send(_head(scope))
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                await response.take(await reader.read(_PIECE_BYTES))
            while not response.is_complete:
                await response.take(await reader.read(_PIECE_BYTES))
        finally:
            protocol.close()
            self.process.left()


def _unavailable(error: Exception) -> PlainTextResponse:
    if isinstance(error, TimeoutError):
        return PlainTextResponse("the page process did not answer in time", 504)
    return PlainTextResponse(str(error) or "the page process ended", 503, {"retry-after": "2"})


def _is_forwarded(scope: Scope) -> bool:
    accept = b"".join(value for name, value in scope["headers"] if name == b"accept")
    return is_for_pages(scope["path"], accept)


def _head(scope: Scope) -> bytes:
    """The request as it is sent on: what a page needs, no cookies, and no keys."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [b"%b: %b" % pair for pair in scope["headers"] if pair[0] in _SENT]
    return b"\r\n".join((*lines, b"connection: close", b"", b""))


class _Connection(asyncio.StreamReaderProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the loop calls it
        super().connection_made(transport)
        self._to = transport

    def send(self, head: bytes) -> None:
        self._to.write(head)

    def close(self) -> None:
        self._to.abort()
