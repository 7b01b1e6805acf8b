"""What a request's scope says beside ASGI: whether its client is still there, header names as sent, one header by name.

For: GuardedProtocol, which fills the scope, and handlers of inference, which read it. Does not know: what headers mean.
Invariants: callbacks of ClientPresence are called at most once each, on the event loop, and not after `forget`;
`scope[SENT_NAMES]`, where it exists, has one name for each entry of `scope["headers"]`, in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import Request

PRESENCE: Final = "llmbackend.client_presence"
"""Key of the scope for a ClientPresence; absent under another ASGI server."""


SENT_NAMES: Final = "llmbackend.sent_header_names"
"""Key of the scope: header names in the case in which the client wrote them; only under CaseKeepingProtocol."""

LABELS: Final = "llmbackend.request_labels"
"""Key of the scope: what the access log says of a request beside its line, as text; absent without labels."""


class ClientPresence:
    """Whether the client of one connection is still there.

    An ASGI application could only await `receive` for this, in a task for each request, which costs more than the whole
    work of an /infer; so the protocol puts this object into the scope."""

    __slots__ = ("_callbacks", "_close", "_is_lost")

    def __init__(self, close: Callable[[], None] | None = None) -> None:
        """close: closes the connection behind what was written; None = there is none."""
        self._close = close or self.lost
        self._is_lost = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the client is gone; at once if it is gone already."""
        if self._is_lost:
            callback()
        else:
            self._callbacks.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    async def disconnect(self) -> None:
        """Closes the connection, so that the client sees that its response is not whole. Returns when it has ended."""
        self._close()
        await self.until_lost()

    async def until_lost(self) -> None:
        """Returns when the client is gone."""
        is_lost = asyncio.Event()
        self.when_lost(is_lost.set)
        try:
            await is_lost.wait()
        finally:
            self.forget(is_lost.set)

    def lost(self) -> None:
        self._is_lost = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


def header(request: Request, name: bytes, default: str = "") -> str:
    """The value of the first header called `name`, which is given in lower case. A search through the few headers is
    faster than starlette's `request.headers`, which builds an object and compares in any case."""
    for key, value in request.scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return default


def headers_as_sent(scope: Any) -> list[tuple[bytes, bytes]]:
    """(name, value) of each header, names as the client wrote them where the protocol kept them."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = scope.get(SENT_NAMES)
    return headers if names is None else [(name, value) for name, (_, value) in zip(names, headers, strict=True)]
