"""Request bodies: read within a limit, decompressed within the same limit.

For: every handler that takes a body. Does not know: what is in it. Invariants: never more than `max_bytes` of one body
are held, whether the client announces a length, sends chunks or sends a compressed bomb; what all bodies hold, as they
came and unpacked, is counted from the first byte on (body_budget.py); the rest is thrown away by the server.
Source: Triton's --http-max-input-size and its compression rules (gzip and deflate; not for generate).
"""

from __future__ import annotations

import asyncio
import io
import zlib
from collections.abc import Sequence
from typing import Final, Literal

from starlette.requests import ClientDisconnect, Request

from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument

from .body_budget import BodyLease
from .http_fields import header
from .work_threads import WorkThreads

SMALL_BYTES: Final = 16 << 10
Encoding = Literal["gzip", "deflate"]
ENCODINGS: Final[tuple[Encoding, ...]] = ("gzip", "deflate")
IDENTITY: Final = "identity"
_PACKED_PIECE_BYTES: Final = 64 << 10
_PIECE_BYTES: Final = 1 << 20
_GZIP_WBITS: Final = 31
"""zlib's "write a gzip header" window setting."""
_AUTO_HEADER_WBITS: Final = 47
"""zlib's "recognise a gzip or a zlib header" window setting."""


class BodyTooLargeError(TritonError):
    def __init__(self, size_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"request JSON size of {size_bytes} bytes exceeds the maximum allowed input size of {max_bytes} bytes. "
            "Use --http-max-input-size to increase the limit.",
            ErrorCode.INVALID_ARG,
        )


def content_encoding(request: Request) -> str:
    """In lower case; "identity" where there is none."""
    return header(request, b"content-encoding").strip().lower() or IDENTITY


async def read_content(request: Request, max_bytes: int, threads: WorkThreads) -> bytes:
    """As `read_body`, unpacked on one of `threads`; the encoding must be one of ENCODINGS, or IDENTITY."""
    body = await read_body(request, max_bytes)
    if content_encoding(request) == IDENTITY:
        return body
    return await threads.run(_decompress, body, max_bytes, BodyLease.of(request))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, read once.

    Raises BodyTooLargeError as soon as it is known to be longer than `max_bytes`, TritonError UNAVAILABLE when the
    bodies that arrive at once have no room for it, ClientDisconnect when it will not come whole.
    """
    announced = header(request, b"content-length")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLargeError(int(announced), max_bytes)
    lease = BodyLease.of(request)
    body = io.BytesIO()
    is_more = True
    while is_more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunk = message.get("body", b"")
        if body.tell() + len(chunk) > max_bytes:
            raise BodyTooLargeError(body.tell() + len(chunk), max_bytes)
        lease.grow(len(chunk))
        body.write(chunk)
        is_more = message.get("more_body", False)
    return body.getvalue()  # not a copy


def release_body(request: Request) -> None:
    """What was read is held no longer: it has been decoded, and what was made of it handed on."""
    BodyLease.of(request).release()


def _decompress(body: bytes, max_bytes: int, lease: BodyLease) -> bytes:
    """`body` unpacked, piece by piece.

    Raises TritonError INVALID_ARG when it is not a complete gzip or deflate stream, BodyTooLargeError when it unpacks
    to more than `max_bytes`, UNAVAILABLE as `read_body`.
    """
    unpacker = zlib.decompressobj(_AUTO_HEADER_WBITS)
    content = io.BytesIO()
    packed = memoryview(body)
    try:
        while packed and not unpacker.eof:
            rest = packed[:_PACKED_PIECE_BYTES].tobytes()
            packed = packed[_PACKED_PIECE_BYTES:]
            while rest and not unpacker.eof:
                piece = unpacker.decompress(rest, _PIECE_BYTES)
                rest = unpacker.unconsumed_tail
                if content.tell() + len(piece) > max_bytes:
                    raise BodyTooLargeError(content.tell() + len(piece), max_bytes)
                lease.grow(len(piece))
                content.write(piece)
        content.write(unpacker.flush())
    except zlib.error as error:
        raise invalid_argument(f"failed to decompress the request body: {error}") from None
    if not unpacker.eof:
        raise invalid_argument("failed to decompress the request body: the compressed data is incomplete")
    lease.grow(-len(body))
    return content.getvalue()


async def compress(parts: Sequence[bytes | memoryview], encoding: Encoding) -> bytes:
    """`parts` as one body, off the event loop, unless a thread would cost more than the work."""
    if sum(map(len, parts)) <= SMALL_BYTES:
        return _compress(parts, encoding)
    return await asyncio.to_thread(_compress, parts, encoding)


def _compress(parts: Sequence[bytes | memoryview], encoding: Encoding) -> bytes:
    packer = zlib.compressobj(wbits=_GZIP_WBITS if encoding == "gzip" else zlib.MAX_WBITS)
    packed = [packer.compress(part) for part in parts]
    return b"".join([*packed, packer.flush()])


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
