"""Engine events from the server's feed; answers in progress with the same key share one stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from .api import Api, ApiError

_PATH: Final = "/v2/engine/events?kinds=engine&interval_ms=50"

Listener = Callable[[dict[str, Any]], None]

_of_key: dict[str, _Stream] = {}
"""Streams with listeners, by API key."""


@contextlib.contextmanager
def listening(key: str, listener: Listener) -> Iterator[None]:
    """Calls `listener` with the data of each `engine` event until the context ends."""
    stream = _of_key.get(key)
    if stream is None:
        stream = _of_key[key] = _Stream(key)
    stream.listeners.append(listener)
    try:
        yield
    finally:
        stream.listeners.remove(listener)
        if not stream.listeners:
            del _of_key[key]
            stream.close()


class _Stream:
    def __init__(self, key: str) -> None:
        self.listeners: list[Listener] = []
        self._api = Api(lambda: key)
        self._reading = asyncio.create_task(self._read())

    def close(self) -> None:
        self._reading.cancel()

    async def _read(self) -> None:
        with contextlib.suppress(ApiError, ValueError):
            async with contextlib.aclosing(self._api.stream("GET", _PATH)) as events:
                async for event in events:
                    if event.name == "engine":
                        news = json.loads(event.data)
                        for listener in tuple(self.listeners):
                            listener(news)
