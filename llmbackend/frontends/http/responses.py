"""Responses with exactly the given headers: bytes, JSON or several buffers; compression.

Invariant: a large body is copied and sent in pieces, at the client's pace, so that it never blocks the event loop.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import httptools
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import RETRY_AFTER_S
from .request_body import Encoding

JSON: Final = "application/json"
TEXT: Final = "text/plain"
PIECE_BYTES: Final = 256 << 10
_NOT_WORTH_A_THREAD_BYTES: Final = 16 << 10
_GZIP_WBITS: Final = 31
"""zlib: write a gzip header."""


def plain(
    content: bytes = b"", status: int = 200, content_type: str = TEXT, headers: Mapping[str, str] | None = None
) -> Response:
    """The content type is exactly `content_type`; Starlette would add a charset."""
    return Response(content, status, {"content-type": content_type, **(headers or {})})


def pieces(part: bytes | memoryview) -> Iterator[bytes]:
    """`part` in copies of at most PIECE_BYTES."""
    view = memoryview(part)
    for start in range(0, len(view), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])


class PartsResponse(Response):
    """A response whose body is `parts`, concatenated."""

    def __init__(
        self,
        parts: Sequence[bytes | memoryview],
        headers: Mapping[str, str],
        status_code: int = 200,
        *,
        has_length: bool = True,
    ) -> None:
        """has_length: whether Content-Length is sent; otherwise the body is chunked"""
        self.status_code = status_code
        self.background = None
        self._parts = parts
        length = {"content-length": str(sum(map(len, parts)))} if has_length else {}
        retry = {"retry-after": RETRY_AFTER_S} if status_code == 503 else {}
        self.init_headers({**headers, **length, **retry})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            for piece in pieces(part):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def compress(parts: Sequence[bytes | memoryview], encoding: Encoding) -> bytes:
    """`parts` as one compressed body; a large one is compressed in a thread."""
    if sum(map(len, parts)) <= _NOT_WORTH_A_THREAD_BYTES:
        return _compress(parts, encoding)
    return await asyncio.to_thread(_compress, parts, encoding)


def _compress(parts: Sequence[bytes | memoryview], encoding: Encoding) -> bytes:
    packer = zlib.compressobj(wbits=_GZIP_WBITS if encoding == "gzip" else zlib.MAX_WBITS)
    packed = [packer.compress(part) for part in parts]
    return b"".join([*packed, packer.flush()])


def response_encoding(accept_encoding: str) -> Encoding | None:
    """The encoding in `Accept-Encoding` with the highest quality, the first one on a tie; None: `identity`."""
    if not accept_encoding:
        return None
    known: dict[str, Encoding | None] = {"identity": None, "gzip": "gzip", "deflate": "deflate"}
    best: tuple[float, Encoding | None] = (0.0, None)
    for item in accept_encoding.split(","):
        name, _, quality = item.partition(";")
        name, weight = name.strip().lower(), _quality(quality)
        if name in known and weight > best[0]:
            best = (weight, known[name])
    return best[1]


def _quality(text: str) -> float:
    key, _, value = text.strip().partition("=")
    if key.strip().lower() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"})


class ForwardedResponse:
    """Parses one response and sends it to the client. The parser calls the `on_…` methods."""

    def __init__(self, send: Send, *, has_body: bool = True, dropped: frozenset[bytes] = HOP_BY_HOP) -> None:
        """has_body: False for HEAD, whose responses have a body's headers but no body"""
        self._send = send
        self._has_body = has_body
        self._dropped = dropped
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._head_is_read = False
        self.has_begun = False
        self.is_complete = False

    async def take(self, data: bytes) -> None:
        """Raises ConnectionResetError if `data` is empty (the connection has ended), and HttpParserError."""
        if not data:
            raise ConnectionResetError("the process that answers has exited")
        self._parser.feed_data(data)
        if self._head_is_read and not self.has_begun:
            self.has_begun = True
            status = self._parser.get_status_code()
            await self._send({"type": "http.response.start", "status": status, "headers": self._headers})
        if self.has_begun:
            body, self._pieces = b"".join(self._pieces), []
            await self._send({"type": "http.response.body", "body": body, "more_body": not self.is_complete})

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in self._dropped:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head_is_read = True
        self.is_complete = not self._has_body

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True
