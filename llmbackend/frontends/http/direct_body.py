"""Fast paths of GuardedProtocol below ASGI: request body chunks, response heads and response body pieces.

Invariants: the parser's callbacks for a chunk are built-in functions (for one-byte chunks, Python callbacks would take
ten times as long as the parser itself). Responses are sent in order, with the same bytes that ASGI messages would
produce. Nothing is written before the head, after the end, to a slow or disconnected client, or while the application's
task may send. Requires that nothing between application and connection transforms the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_CHUNKS: Final = 65_536
"""Limit for one body, excluding the empty last chunk; Triton's limit and message."""
TOO_MANY_CHUNKS: Final = (
    f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."
)
_PARSED_AT_ONCE_BYTES: Final = 64 << 10
_DENSE_PARSED_AT_ONCE_BYTES: Final = 8 << 10
"""Used at the beginning of a request and after many small chunks: the parser takes 0.2 ms for 1,400 one-byte chunks."""
_DENSE_PIECES: Final = 64


class BodyPieces:
    """The received body pieces of one connection."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._heads = count()
        """Counter of chunk headers. Reading it also increments it; `_heads_before` corrects for that."""
        self._heads_before = 0
        """Chunk headers seen before this request's first chunk."""
        self.is_dense = False
        """Whether the last parsed data had many chunks; if so, the rest of the read waits for the next turn."""
        self.parsed_at_once_bytes = _DENSE_PARSED_AT_ONCE_BYTES
        """How many bytes of one read are parsed at once."""

    def parser(self, protocol: Any) -> httptools.HttpRequestParser:
        """A parser that calls `protocol` for everything except body chunks."""
        return httptools.HttpRequestParser(_Callbacks(protocol, self._pieces.append, self._heads.__next__))

    def begin(self) -> None:
        self._heads_before = next(self._heads) + 1
        self.parsed_at_once_bytes = _DENSE_PARSED_AT_ONCE_BYTES

    def take(self) -> bytes:
        """Returns what has arrived since the last call."""
        pieces = self._pieces
        self.is_dense = len(pieces) > _DENSE_PIECES
        self.parsed_at_once_bytes = _DENSE_PARSED_AT_ONCE_BYTES if self.is_dense else _PARSED_AT_ONCE_BYTES
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return body

    @property
    def num_chunks(self) -> int:
        """Chunks of the current request so far, including the empty last one."""
        self._heads_before += 1
        return next(self._heads) + 1 - self._heads_before


class _Callbacks:
    """The parser's callbacks, looked up when the parser is created."""

    def __init__(self, protocol: Any, on_body: Callable[[bytes], None], on_chunk_header: Callable[[], int]) -> None:
        self.on_message_begin = protocol.on_message_begin
        self.on_url = protocol.on_url
        self.on_header = protocol.on_header
        self.on_headers_complete = protocol.on_headers_complete
        self.on_message_complete = protocol.on_message_complete
        self.on_body = on_body
        self.on_chunk_header = on_chunk_header


_NOT_JOINED_BYTES: Final = 64 << 10
"""Above this size, copying the first part of a body costs more than a separate write."""


class HeadJoined(asyncio.Transport):
    """Joins head and body in one write. A separate write, as in uvicorn, costs a packet, a system call and a wake-up of
    the client: a tenth of the time of a small request."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        """close: closes the connection once the response is written"""
        self._transport = transport
        self._loop = loop
        self._close = close
        self._is_first = True
        self._head: bytes | None = None
        self._flushing: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:  # type: ignore[override]  # as uvicorn calls it
        if self._is_first:
            self._is_first = False
            self._head = data
            self._flushing = self._loop.call_soon(self._flush)
        elif self._head is None:
            self._transport.write(data)
        elif len(data) >= _NOT_JOINED_BYTES:
            self._flush()
            self._transport.write(data)
        else:
            self._head += data
            self._flush()

    def close(self) -> None:
        self._flush()
        self._close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if head is not None and not self._transport.is_closing():
            self._transport.write(head)


_DIRECT_BODY: Final = "llmbackend.direct_body"
"""Key in the ASGI scope."""


class DirectBody:
    """The body of one response. Used on the event loop."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl) -> None:
        self._cycle = cycle
        self._flow = flow

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> DirectBody | None:
        return scope.get(_DIRECT_BODY)

    def add_to(self, scope: Any) -> None:
        scope[_DIRECT_BODY] = self

    @staticmethod
    def remove_from(scope: Any) -> None:
        """Removes the body from `scope`, for an application whose messages do not go directly to the connection."""
        scope.pop(_DIRECT_BODY, None)

    @property
    def is_open(self) -> bool:
        """Whether a piece may be written: the head of a chunked response was sent, and the client keeps up."""
        cycle = self._cycle
        return not (
            self._flow.write_paused or not cycle.chunked_encoding or cycle.disconnected or cycle.response_complete
        )

    def write(self, piece: bytes) -> None:
        """Writes one non-empty chunk. Requires `is_open`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
