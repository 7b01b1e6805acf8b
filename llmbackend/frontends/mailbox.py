"""The way of a response from an engine's thread into the event loop of a frontend.

For: every frontend. Does not know: protocols, backends. Invariants: the event loop is woken once for all responses
that are put before it runs, so that an engine step costs one wake-up and not one per token; putting never waits; what
waits for one client is bounded by its Backlog: past that its request ends with an error after what was there already.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from llmbackend.core.backend_api import ResponseFlag, is_final
from llmbackend.core.errors import cancelled
from llmbackend.core.messages import InferenceResponse
from llmbackend.core.requests.held_bytes import RESPONSE_BYTES, held_bytes
from llmbackend.core.tensors import Tensor

Item = tuple[InferenceResponse | None, ResponseFlag]


_MOST_ELEMENTS: Final = 16 << 10
_MOST_BYTES: Final = 256 << 10
"""JSON of so much is made in 2 to 5 ms."""


def size_bytes(item: Item) -> int:
    """About how much memory `item` holds."""
    return RESPONSE_BYTES if item[0] is None else held_bytes(item[0].outputs)


def are_large(tensors: Sequence[Tensor]) -> bool:
    """Whether making JSON of them, or copying them, takes more than some milliseconds."""
    return sum(tensor.data.size for tensor in tensors) > _MOST_ELEMENTS or held_bytes(tensors) > _MOST_BYTES


class Mailbox:
    """Belongs to one event loop; `put` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._items: deque[tuple[ResponseStream, Item, int]] = deque()
        self._woken = False

    def put(self, stream: ResponseStream, item: Item) -> None:
        size = size_bytes(item)  # here and not on the event loop: of many strings it takes a while
        with self._lock:
            self._items.append((stream, item, size))
            if self._woken:
                return
            self._woken = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed: its clients are gone
            return

    def _deliver(self) -> None:
        with self._lock:
            items, self._items = self._items, deque()
            self._woken = False
        for stream, item, size in items:
            stream.deliver(item, size)


class Backlog:
    """How much waits for one client. The streams of requests that it reads through one connection share one."""

    __slots__ = ("limit_bytes", "waiting_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.waiting_bytes = 0


class ResponseStream:
    """The responses of one request, in order, until FINAL. Used on the event loop alone, but for the call.

    The instance itself is the request's `response_callback`. `on_response` is called for each response that can be
    popped; without it, `next` waits. A request may always have one response waiting, so that the limit is about
    streams and not about the size of a tensor.
    """

    def __init__(self, mailbox: Mailbox, backlog: Backlog, on_response: Callable[[], None] | None = None) -> None:
        self._mailbox = mailbox
        self._backlog = backlog
        self._on_response = on_response or self._wake
        self._waiting_bytes = 0
        self._ready: deque[tuple[Item, int]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self.on_overflow: Callable[[], None] | None = None

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        self._mailbox.put(self, (response, flags))

    def deliver(self, item: Item, size: int) -> None:
        """Called by the mailbox on the event loop. Nothing is taken in after FINAL, an overflow or `close`."""
        if self._ended:
            return
        if self._ready and self._backlog.waiting_bytes + size > self._backlog.limit_bytes and item[0] is not None:
            item = _too_slow(item[0], self._backlog.limit_bytes)
            size = RESPONSE_BYTES
            if self.on_overflow is not None:
                self.on_overflow()
        self._ended = is_final(item[1])
        self._ready.append((item, size))
        self._waiting_bytes += size
        self._backlog.waiting_bytes += size
        self._on_response()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_over(self) -> bool:
        """FINAL has come and everything was taken."""
        return self._ended and not self._ready

    async def next(self) -> Item | None:
        """The next (response, flags); None after FINAL."""
        while not self._ready:
            if self._ended:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.pop()

    def pop(self) -> Item:
        """The oldest response that is here. Raises IndexError when none is."""
        item, size = self._ready.popleft()
        self._release(size)
        return item

    def pop_all(self) -> list[Item]:
        """All responses that are here already, without waiting: lets a frontend merge them into one write."""
        items = [item for item, _ in self._ready]
        self._ready.clear()
        self._release(self._waiting_bytes)
        return items

    def close(self) -> None:
        """Drops what is here and whatever still comes."""
        self._ended = True
        self._ready.clear()
        self._release(self._waiting_bytes)

    def _release(self, size: int) -> None:
        self._waiting_bytes -= size
        self._backlog.waiting_bytes -= size


def _too_slow(response: InferenceResponse, limit_bytes: int) -> Item:
    """What a client that fell too far behind gets after all that it was sent before."""
    error = cancelled(
        f"the request was cancelled: its client reads too slowly, more than {limit_bytes} bytes were waiting for it"
    )
    return (
        InferenceResponse(response.model_name, response.model_version, response.request_id, error=error),
        ResponseFlag.FINAL,
    )
