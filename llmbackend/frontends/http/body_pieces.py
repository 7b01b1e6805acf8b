"""BodyPieces: the pieces of a request's body as the parser finds them, joined and counted without Python's part.

For: GuardedProtocol, whose parser calls it for each chunk of a body. Does not know: requests, limits of time.
Invariant: a chunk costs no bytecode, since both callbacks that the parser calls for one are built-in functions. In a
body in chunks of one byte each takes six bytes on the wire, and methods in Python would take ten times the parser's
own time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Final

import httptools

MAX_CHUNKS: Final = 65_536
"""Of one body, those that are not empty. Source: Triton's HTTP frontend, and its text."""
TOO_MANY_CHUNKS: Final = (
    f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."
)
_PARSED_AT_ONCE_BYTES: Final = 64 << 10
_DENSE_PARSED_AT_ONCE_BYTES: Final = 8 << 10
"""Of the beginning of a request and of what comes in many chunks: some 1,400 chunks of one byte take the parser 0.2
ms."""
_DENSE_PIECES: Final = 64


class BodyPieces:
    """Of one connection."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._heads = count()
        """Of chunks; reading the counter counts, too."""
        self._heads_before = 0
        """What the counter stands at where no chunk of this request has begun."""
        self.is_dense = False
        """Whether what was parsed last came in many chunks: the rest of it then waits for the next turn."""
        self.parsed_at_once_bytes = _DENSE_PARSED_AT_ONCE_BYTES
        """How much of a read may be parsed next."""

    def parser(self, protocol: Any) -> httptools.HttpRequestParser:
        """One that tells `protocol` everything but the pieces of bodies."""
        return httptools.HttpRequestParser(_Callbacks(protocol, self._pieces.append, self._heads.__next__))

    def begin(self) -> None:
        """To be called when another request begins."""
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
        """Of the request that is being received: those that have begun, the empty last one included."""
        self._heads_before += 1
        return next(self._heads) + 1 - self._heads_before


class _Callbacks:
    """What the parser calls; it looks each up once."""

    def __init__(self, protocol: Any, on_body: Callable[[bytes], None], on_chunk_header: Callable[[], int]) -> None:
        self.on_message_begin = protocol.on_message_begin
        self.on_url = protocol.on_url
        self.on_header = protocol.on_header
        self.on_headers_complete = protocol.on_headers_complete
        self.on_message_complete = protocol.on_message_complete
        self.on_body = on_body
        self.on_chunk_header = on_chunk_header
