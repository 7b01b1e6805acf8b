"""Request bodies: read within a limit, decompressed within the same limit.

For: every handler that takes a body. Does not know: what is in it. Invariant: never more than `max_bytes` of one body
are held, whether the client announces a length, sends chunks or sends a compressed bomb; the rest is read and thrown
away by the server.
Source: Triton's --http-max-input-size and its compression rules (gzip and deflate, /infer only).
"""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Final, Literal

from starlette.requests import ClientDisconnect, Request

from llmbackend.core.errors import TritonError, invalid_argument

from .http_fields import header

SMALL_BYTES: Final = 16 << 10
Encoding = Literal["gzip", "deflate"]
ENCODINGS: Final[tuple[Encoding, ...]] = ("gzip", "deflate")
_AUTO_HEADER_WBITS: Final = 47
"""zlib's "recognise a gzip or a zlib header" window setting."""


def _too_large(size_bytes: int, max_bytes: int) -> TritonError:
    return invalid_argument(
        f"request JSON size of {size_bytes} bytes exceeds the maximum allowed input size of {max_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, read once. Raises TritonError INVALID_ARG as soon as it is known to be longer than `max_bytes`,
    ClientDisconnect when it will not come whole."""
    announced = header(request, b"content-length")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(int(announced), max_bytes)
    chunks: list[bytes] = []
    size = 0
    is_more = True
    while is_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(size, max_bytes)
        chunks.append(chunk)
        is_more = message.get("more_body", False)
    return b"".join(chunks)


async def decompress(body: bytes, max_bytes: int) -> bytes:
    """`body` unpacked off the event loop.

    Raises TritonError INVALID_ARG when it is not a complete gzip or deflate stream, or unpacks to more than
    `max_bytes`.
    """
    return await asyncio.to_thread(_decompress, body, max_bytes)


def _decompress(body: bytes, max_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(_AUTO_HEADER_WBITS)
    try:
        data = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise invalid_argument(f"failed to decompress the request body: {error}") from None
    if len(data) > max_bytes:
        raise _too_large(len(data), max_bytes)
    if not unpacker.eof:
        raise invalid_argument("failed to decompress the request body: the compressed data is incomplete")
    return data


async def compress(body: bytes, encoding: Encoding) -> bytes:
    """Off the event loop, unless a thread would cost more than the work."""
    work = gzip.compress if encoding == "gzip" else zlib.compress
    return work(body) if len(body) <= SMALL_BYTES else await asyncio.to_thread(work, body)


def response_encoding(accept_encoding: str) -> Encoding | None:
    """The encoding of `Accept-Encoding` with the highest quality that we have, the first of equals; None = send as it
    is, which a client may prefer by naming `identity`."""
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
