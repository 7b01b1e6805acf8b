"""One client per protocol: takes a StreamSpec, yields pieces.

Used by the load. Independent of what is expected. Invariant: closing the iterator (or cancelling its reader) ends the
request on the wire immediately, as if the client had disconnected.
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
