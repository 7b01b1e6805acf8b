"""One client for each protocol: a StreamSpec in, pieces out.

For: the load. Does not know: what is expected. Invariant: closing the iterator (or cancelling its reader) ends the
request on the wire at once, as a client that goes away does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from ..outcome import Piece
from ..specs import StreamSpec


class StreamClient(Protocol):
    def pieces(self, spec: StreamSpec) -> AsyncIterator[Piece]:
        """What the server sends, piece by piece. Raises StreamFailed."""
        ...

    async def close(self) -> None: ...
