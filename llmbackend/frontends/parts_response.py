"""A response whose body is several buffers, sent in pieces.

For: handlers with large answers. Does not know: what the parts are. Invariant: neither the whole body nor a large part
of it is copied at once, so others on the event loop go on between the pieces; the client's pace holds the sending back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE_BYTES: Final = 256 << 10


def pieces(part: bytes | memoryview) -> Iterator[bytes]:
    """`part` in copies of at most PIECE_BYTES."""
    view = memoryview(part)
    for start in range(0, len(view), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])


class PartsResponse(Response):
    """A 200 with `parts` one after the other as its body."""

    def __init__(self, parts: Sequence[bytes | memoryview], headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self._parts = parts
        self.init_headers({**headers, "content-length": str(sum(map(len, parts)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            for piece in pieces(part):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
