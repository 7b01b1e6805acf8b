"""What a client does when its server is gone: it reconnects, for a limited time.

Used by clients that can resume. Independent of protocols. Invariant: each interruption is reported to the caller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..outcome import StreamFailed
from ..specs import StreamSpec

AGAIN_S = 0.05
GONE = ("connection", "503", "UNAVAILABLE", "StatusCode.UNAVAILABLE", "CANCELLED", "StatusCode.CANCELLED")
"""Codes of a server that is not there, or not ready again."""


def _ignore(spec: StreamSpec, error: StreamFailed) -> None:
    pass


@dataclass(frozen=True)
class Patience:
    """seconds: since the last thing that came from the server. on_break: called with each break."""

    seconds: float = 0.0
    on_break: Callable[[StreamSpec, StreamFailed], None] = _ignore

    def begin(self, spec: StreamSpec) -> Waiting:
        return Waiting(self, spec)


class Waiting:
    """Of one stream. Owner: its reader."""

    def __init__(self, patience: Patience, spec: StreamSpec) -> None:
        self._patience, self._spec = patience, spec
        self.served()

    def served(self) -> None:
        """Something came."""
        self._deadline_s = time.monotonic() + self._patience.seconds

    async def again(self, error: StreamFailed) -> None:
        """Returns when it is time to come back. Raises `error` where the server is there, or was gone for too long."""
        if error.code not in GONE or time.monotonic() > self._deadline_s:
            raise error
        self._patience.on_break(self._spec, error)
        await asyncio.sleep(AGAIN_S)


NO_PATIENCE = Patience()
