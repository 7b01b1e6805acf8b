"""Request bodies: read and decompressed within a limit, and counted while the server holds them in memory.

Invariant: at most `max_bytes` of one body are held, whether it has a Content-Length, is chunked or is a decompression
bomb. Source: Triton's --http-max-input-size and its compression rules (gzip and deflate; not for generate).
"""

from __future__ import annotations

import io
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Final, Literal

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from llmbackend.core.errors import TritonError, invalid_argument, unavailable

from ..errors import BodyTooLargeError, UnpackedBodyTooLargeError
from ..workers import WorkThreads
from .request_scope import header

MAX_CONTROL_BYTES: Final = 1 << 20
"""Limit for control requests, except for loads with files."""
BODY_LEASE: Final = "llmbackend.body_lease"
"""Scope key of a BodyLease; absent under an application other than this package's."""
_MIN_BODIES_HELD: Final = 4
"""How many of the largest bodies fit: a body counts twice while it is decompressed, and one client gets half."""
Encoding = Literal["gzip", "deflate"]
ENCODINGS: Final[tuple[Encoding, ...]] = ("gzip", "deflate")
IDENTITY: Final = "identity"
_PACKED_PIECE_BYTES: Final = 64 << 10
_PIECE_BYTES: Final = 1 << 20
_AUTO_HEADER_WBITS: Final = 47
"""zlib: detect a gzip or zlib header."""


def address_of(scope: Scope) -> str:
    """Identifies a client by its address alone."""
    return f"address {(scope.get('client') or [''])[0]}"


class BodyBudget:
    """The memory of all request bodies of one server, compressed and decompressed, from their first byte on.
    Thread-safe.

    No client may hold more memory than remains free after it: one gets a half, two get a third each, and a new one
    always finds some.
    """

    def __init__(self, max_bytes: int, owner_of: Callable[[Scope], str] = address_of) -> None:
        """owner_of: returns the client of a request"""
        self._max_bytes = max_bytes
        self.owner_of = owner_of
        self._held: Counter[str] = Counter()
        self.held_bytes = 0
        self._lock = threading.Lock()

    def raise_to_fit(self, body_bytes: int) -> None:
        """Raises the budget, if needed, to one that fits a body of this size."""
        self._max_bytes = max(self._max_bytes, _MIN_BODIES_HELD * body_bytes)

    def take(self, owner: str, size_bytes: int) -> None:
        """Raises TritonError UNAVAILABLE, without taking anything, if the budget would be exceeded."""
        with self._lock:
            held = self._held[owner] + size_bytes
            if size_bytes > 0 and held > self._max_bytes - self.held_bytes - size_bytes:
                raise unavailable(
                    f"the server has no memory for the rest of this request's body: of {self._max_bytes} bytes for all "
                    f"bodies, {self.held_bytes} are in use, {self._held[owner]} of them by this client"
                )
            self.held_bytes += size_bytes
            self._held[owner] = held
            if not held:
                del self._held[owner]


class BodyLease:
    """One request's share of the body budget, until the request ends at the latest. Used by one thread at a time."""

    __slots__ = ("_budget", "_owner", "_size_bytes")

    def __init__(self, budget: BodyBudget | None) -> None:
        """budget: None: no limit"""
        self._budget = budget
        self._owner = ""
        self._size_bytes = 0

    @classmethod
    def of(cls, request: Request) -> BodyLease:
        """The lease of `request` for its client."""
        lease: BodyLease = request.scope.get(BODY_LEASE) or cls(None)
        if not lease._owner:
            lease._owner = address_of(request.scope) if lease._budget is None else lease._budget.owner_of(request.scope)
        return lease

    def grow(self, size_bytes: int) -> None:
        """size_bytes: may be negative. Raises TritonError UNAVAILABLE if the budget is exhausted."""
        if self._budget is not None:
            self._budget.take(self._owner, size_bytes)
            self._size_bytes += size_bytes

    def release(self) -> None:
        """Idempotent."""
        if self._size_bytes:
            self.grow(-self._size_bytes)


def content_encoding(request: Request) -> str:
    """The encoding in lower case; "identity" by default."""
    return header(request, b"content-encoding").strip().lower() or IDENTITY


async def read_content(request: Request, max_bytes: int, threads: WorkThreads) -> bytes:
    """Like `read_body`, but decompresses on one of `threads`. The encoding must be one of ENCODINGS, or IDENTITY."""
    body = await read_body(request, max_bytes)
    if content_encoding(request) == IDENTITY:
        return body
    return await threads.run(_decompress, body, max_bytes, BodyLease.of(request))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Reads the whole body; to be called once.

    Raises BodyTooLargeError as soon as it is known to be longer than `max_bytes`, TritonError UNAVAILABLE if the budget
    is exhausted, ClientDisconnect if the rest will not come.
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
    return body.getvalue()  # does not copy


def too_large() -> TritonError:
    """The error for a control request beyond MAX_CONTROL_BYTES."""
    return invalid_argument(f"the request has more than {MAX_CONTROL_BYTES} bytes, the maximum for this endpoint")


async def read_control(request: Request) -> bytes:
    """Like `read_body`, but raises TritonError INVALID_ARG beyond MAX_CONTROL_BYTES."""
    try:
        return await read_body(request, MAX_CONTROL_BYTES)
    except BodyTooLargeError:
        raise too_large() from None


def release_body(request: Request) -> None:
    """To be called once the body is decoded: its bytes are no longer counted."""
    BodyLease.of(request).release()


def _decompress(body: bytes, max_bytes: int, lease: BodyLease) -> bytes:
    """Raises TritonError INVALID_ARG if `body` is not a complete gzip or deflate stream, UnpackedBodyTooLargeError if
    it decompresses to more than `max_bytes`, UNAVAILABLE as `read_body`."""
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
                    raise UnpackedBodyTooLargeError(content.tell() + len(piece), max_bytes)
                lease.grow(len(piece))
                content.write(piece)
        content.write(unpacker.flush())
    except zlib.error as error:
        raise invalid_argument(f"failed to decompress the request body: {error}") from None
    if not unpacker.eof:
        raise invalid_argument("failed to decompress the request body: the compressed data is incomplete")
    lease.grow(-len(body))
    return content.getvalue()
