"""An open inference of a frontend: receives the responses of one request on the event loop, and can cancel it.

Used by HTTP and gRPC handlers; created by InferenceGate. Independent of formats and backends. Invariants: an engine
step wakes the event loop once, and calls each listener once for all its responses; a client's waiting bytes are bounded
by its Backlog; an accepted inference ends with `close`, which cancels it unless its FINAL response was taken.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from starlette.requests import Request

from llmbackend.core.backend_api import ResponseFlag, is_final
from llmbackend.core.errors import cancelled
from llmbackend.core.messages import RESPONSE_BYTES, InferenceHandle, InferenceResponse, held_bytes, wake_receiver
from llmbackend.core.outputs import Outputs

from .http.request_scope import PRESENCE, ClientPresence

log = logging.getLogger(__name__)

_NONE = ResponseFlag.NONE
"""A module constant: looking up the enum member takes longer than the rest of a flag check."""

Item = tuple[InferenceResponse | None, ResponseFlag]
"""The arguments of a response callback."""


class Mailbox:
    """Carries responses from backend threads to the event loop on which it was created."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._thread = threading.get_ident()
        self._arrived: deque[tuple[Inference, InferenceResponse | None, ResponseFlag, int]] = deque()
        self._is_woken = False
        """Whether `_deliver` will be called. Needs no lock: a response is enqueued before this is read, and this is
        reset before responses are taken; at worst the loop is woken once too often."""

    def put(self, inference: Inference, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        """Thread-safe; never waits."""
        size_bytes = response_bytes(response)  # not on the event loop: slow for many strings
        self._arrived.append((inference, response, flags, size_bytes))
        if not self._is_woken:
            self._is_woken = True
            wake_receiver(self._wake)

    def _wake(self) -> None:
        if threading.get_ident() == self._thread:
            self.loop.call_soon(self._deliver)  # saves the system calls of call_soon_threadsafe
            return
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and its clients are gone
            return

    def _deliver(self) -> None:
        self._is_woken = False
        arrived = self._arrived
        heard: dict[Listener, list[Inference]] = {}
        for _ in range(len(arrived)):
            inference, response, flags, size_bytes = arrived.popleft()
            if inference.deliver(response, flags, size_bytes) and (listener := inference.listener) is not None:
                heard.setdefault(listener, []).append(inference)
        for listener, inferences in heard.items():
            try:
                listener(inferences)
            except Exception:
                log.exception("the listener of an inference failed")  # other inferences continue


class Backlog:
    """The bytes that wait for one client, over all inferences that it reads through one connection."""

    __slots__ = ("limit_bytes", "waiting_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.waiting_bytes = 0


class Inference:
    """One request to the host and its responses, in order, until FINAL.

    The instance is the request's response callback, which any thread may call; everything else is used on the event
    loop. A `listener` reads with `pop`, other code with `next` or `collect`. When `backlog` is full, the request ends
    with an error after the waiting responses. One response of any size may always wait.
    """

    __slots__ = (
        "_backlog", "_handle", "_is_closed", "_mailbox", "_on_close", "_presence", "_ready", "_takes_no_more",
        "_waiter", "_waiting_bytes", "listener",
    )  # fmt: skip

    def __init__(self, mailbox: Mailbox, backlog: Backlog, listener: Listener | None = None) -> None:
        self.listener = listener
        """May be changed at any time; is called only for responses that arrive afterwards."""
        self._mailbox = mailbox
        self._backlog = backlog
        self._ready: deque[tuple[InferenceResponse | None, ResponseFlag, int]] = deque()
        self._waiting_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._takes_no_more = False
        self._handle: InferenceHandle | None = None
        self._on_close: Callable[[], None] | None = None
        self._presence: ClientPresence | None = None
        self._is_closed = False

    def accepted(self, handle: InferenceHandle, on_close: Callable[[], None] | None = None) -> Inference:
        """To be called once the host has accepted the request; `close` must follow."""
        self._handle, self._on_close = handle, on_close
        return self

    # --- responses --------------------------------------------------------------------------------------------------

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        self._mailbox.put(self, response, flags)

    def deliver(self, response: InferenceResponse | None, flags: ResponseFlag, size_bytes: int) -> bool:
        """Called by the mailbox. Returns False if the response is dropped: after FINAL, an overflow or `close`."""
        if self._takes_no_more:
            return False
        backlog = self._backlog
        if self._ready and backlog.waiting_bytes + size_bytes > backlog.limit_bytes and response is not None:
            response, flags, size_bytes = _too_slow(response, backlog.limit_bytes), ResponseFlag.FINAL, RESPONSE_BYTES
            if self._handle is not None:
                self._handle.cancel()
        if flags is not _NONE:
            self._takes_no_more = is_final(flags)
        self._ready.append((response, flags, size_bytes))
        self._waiting_bytes += size_bytes
        backlog.waiting_bytes += size_bytes
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return True

    @property
    def is_over(self) -> bool:
        """Whether FINAL was taken."""
        return self._takes_no_more and not self._ready

    @property
    def has_responses(self) -> bool:
        """Whether a response can be popped."""
        return bool(self._ready)

    def pop(self) -> Item:
        """The oldest waiting response. Raises IndexError if there is none."""
        response, flags, size_bytes = self._ready.popleft()
        self._waiting_bytes -= size_bytes
        self._backlog.waiting_bytes -= size_bytes
        return response, flags

    async def next(self) -> Item | None:
        """Waits for one response. None after FINAL."""
        while not self._ready:
            if self._takes_no_more:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.pop()

    async def collect(self, at_most: int) -> list[InferenceResponse]:
        """The first `at_most` responses, after FINAL; the others are dropped as they arrive."""
        responses: list[InferenceResponse] = []
        while (item := await self.next()) is not None:
            if item[0] is not None and len(responses) < at_most:
                responses.append(item[0])
        return responses

    # --- end --------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Asks the host to end the request; its FINAL response still arrives. No effect once FINAL was taken."""
        if self._handle is not None and (self._ready or not self._takes_no_more):
            self._handle.cancel()

    def cancel_on_disconnect(self, request: Request) -> None:
        """Until `close`, a client disconnect cancels the inference. The body must have been read."""
        self._presence = request.scope[PRESENCE]
        self._presence.when_lost(self.cancel)

    def outlive_client(self) -> None:
        """Undoes `cancel_on_disconnect`."""
        if self._presence is not None:
            self._presence.forget(self.cancel)

    def close(self) -> None:
        """Cancels the request unless it has ended; drops waiting and later responses. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.outlive_client()
        self.cancel()
        self._handle = None  # it refers to this object
        self._takes_no_more = True
        self._ready.clear()
        self._backlog.waiting_bytes -= self._waiting_bytes
        self._waiting_bytes = 0
        if self._on_close is not None:
            self._on_close()


Listener = Callable[[Sequence[Inference]], None]
"""Called on the event loop, once for all responses of a wake-up, with the inference of each response in order of
arrival. Inferences may share a listener."""


def _too_slow(response: InferenceResponse, limit_bytes: int) -> InferenceResponse:
    """The last response to a client whose backlog is full."""
    error = cancelled(
        f"the request was cancelled: its client reads too slowly, more than {limit_bytes} bytes were waiting for it"
    )
    return InferenceResponse(response.model_name, response.model_version, response.request_id, error=error)


def response_bytes(response: InferenceResponse | None) -> int:
    """Approximate memory of a response."""
    if response is None:
        return RESPONSE_BYTES
    outputs = response.outputs
    return RESPONSE_BYTES + outputs.num_bytes() if type(outputs) is Outputs else held_bytes(outputs)
