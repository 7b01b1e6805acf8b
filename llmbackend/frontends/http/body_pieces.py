"""BodyPieces: collects and counts the chunks of a request's body without running Python code for each of them.

For: GuardedProtocol, whose parser calls it for each chunk of a body. Does not know: requests, time limits. Invariant:
the callbacks that the parser calls for a chunk are built-in functions. A chunk of one byte takes six bytes on the wire,
and callbacks in Python would take ten times as long as the parser itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Final

import httptools

MAX_CHUNKS: Final = 65_536
"""Of one body, without the empty last one. Source: Triton's HTTP frontend, as is the text below."""
TOO_MANY_CHUNKS: Final = (
    f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."
)
_PARSED_AT_ONCE_BYTES: Final = 64 << 10
_DENSE_PARSED_AT_ONCE_BYTES: Final = 8 << 10
"""At the beginning of a request, and after many small chunks: 1,400 chunks of one byte take the parser 0.2 ms."""
_DENSE_PIECES: Final = 64


class BodyPieces:
    """Of one connection."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._heads = count()
        """Counts chunk headers. Reading the count increments it."""
        self._heads_before = 0
        """The count before the first chunk of this request."""
        self.is_dense = False
        """Whether the data parsed last had many chunks: the rest of the read then waits for the next turn."""
        self.parsed_at_once_bytes = _DENSE_PARSED_AT_ONCE_BYTES
        """How much of a read may be parsed next."""

    def parser(self, protocol: Any) -> httptools.HttpRequestParser:
        """A parser that calls `protocol` for everything except chunks of bodies."""
        return httptools.HttpRequestParser(_Callbacks(protocol, self._pieces.append, self._heads.__next__))

    def begin(self) -> None:
        """A request begins."""
        self._heads_before = next(self._heads) + 1
        self.parsed_at_once_bytes = _DENSE_PARSED_AT_ONCE_BYTES

    def take(self) -> bytes:
        """What has arrived since the last call."""
        pieces = self._pieces
        self.is_dense = len(pieces) > _DENSE_PIECES
        self.parsed_at_once_bytes = _DENSE_PARSED_AT_ONCE_BYTES if self.is_dense else _PARSED_AT_ONCE_BYTES
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        return body

    @property
    def num_chunks(self) -> int:
        """Chunks of the current request that have begun, including the empty last one."""
        self._heads_before += 1
        return next(self._heads) + 1 - self._heads_before


class _Callbacks:
    """The parser's callbacks, which it looks up when it is made."""

    def __init__(self, protocol: Any, on_body: Callable[[bytes], None], on_chunk_header: Callable[[], int]) -> None:
        self.on_message_begin = protocol.on_message_begin
        self.on_url = protocol.on_url
        self.on_header = protocol.on_header
        self.on_headers_complete = protocol.on_headers_complete
        self.on_message_complete = protocol.on_message_complete
        self.on_body = on_body
        self.on_chunk_header = on_chunk_header
