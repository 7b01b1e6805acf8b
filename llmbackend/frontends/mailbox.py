"""The way of a response from an engine's thread into the event loop of a frontend.

For: every streaming frontend. Does not know: protocols, backends. Invariant: the event loop is woken once for all
responses that are put before it runs, so that an engine step costs one wake-up and not one per token.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.messages import InferenceResponse

Item = tuple[InferenceResponse | None, ResponseFlag]


class Mailbox:
    """Belongs to one event loop; `put` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._items: deque[tuple[ResponseStream, Item]] = deque()
        self._woken = False

    def put(self, stream: ResponseStream, item: Item) -> None:
        with self._lock:
            self._items.append((stream, item))
            if self._woken:
                return
            self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: its clients are gone
            return

    def _deliver(self) -> None:
        with self._lock:
            items, self._items = self._items, deque()
            self._woken = False
        for stream, item in items:
            stream.deliver(item)


class ResponseStream:
    """The responses of one request, as an async iterator of (response, flags) that ends after FINAL.

    The instance itself is the request's `response_callback`.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._ready: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._final = False

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        self._mailbox.put(self, (response, flags))

    def deliver(self, item: Item) -> None:
        """Called by the mailbox on the event loop."""
        self._ready.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Item:
        """The next (response, flags). Raises StopAsyncIteration after FINAL."""
        while not self._ready:
            if self._final:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        item = self._ready.popleft()
        self._final = self._final or bool(item[1] & ResponseFlag.FINAL)
        return item

    def pop_ready(self) -> list[Item]:
        """All responses that are here already, without waiting: lets a frontend merge them into one write."""
        items = list(self._ready)
        self._ready.clear()
        self._final = self._final or any(flags & ResponseFlag.FINAL for _, flags in items)
        return items

    def __aiter__(self) -> AsyncIterator[Item]:
        return self

    async def __anext__(self) -> Item:
        return await self.next()
