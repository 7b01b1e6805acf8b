"""Whether the client of an HTTP request is still there, told by its connection.

For: http_protocol, which knows, and whoever cancels work that nobody waits for. Does not know: requests. Invariant:
each callback is called at most once, on the event loop, and not after `forget`.
An ASGI application can only await `receive` for this, with a task for each request; that costs more than an /infer's
own work, so the protocol puts this into the scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

PRESENCE: Final = "llmbackend.client_presence"
"""Key of the scope; not there under another ASGI server."""


class ClientPresence:
    """Of one connection."""

    __slots__ = ("_callbacks", "_is_lost")

    def __init__(self) -> None:
        self._is_lost = False
        self._callbacks: list[Callable[[], None]] = []

    def when_lost(self, callback: Callable[[], None]) -> None:
        """At once for a client that is gone."""
        if self._is_lost:
            callback()
        else:
            self._callbacks.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def lost(self) -> None:
        self._is_lost = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
