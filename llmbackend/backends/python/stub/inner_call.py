"""One inference that a model runs on another model: the request on its way, and its responses (BLS).

For: InferenceRequest.exec and async_exec. Does not know: schedulers, the other model. Invariants: a call whose caller
lost interest (a cancelled task, an iterator that was dropped half way) is cancelled in the host; a refusal comes as a
response with an error, never as an exception, as in Triton. Source: python_backend's request executor and iterator.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from .errors import TritonError
from .host_link import HostLink
from .pb_response import InferenceResponse

if TYPE_CHECKING:
    import asyncio  # a process that never awaits starts without it

_Answer = tuple[InferenceResponse | None, bool]
"""A response or none, and whether the call is over."""
_EMPTY = "Unexpected empty response."


class InnerCall:
    def __init__(self, link: HostLink, request: dict[str, Any], parts: Sequence[Any], is_stream: bool) -> None:
        self._link = link
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._is_over = False
        self._lock = threading.Lock()
        self._has_last = False
        self._on_last: Callable[[], None] | None = None
        self._number = link.start(("infer", is_stream, request), parts, self._take)

    def next(self) -> _Answer:
        """Blocks for what comes next."""
        answer = self._answers.get()
        self._is_over = answer[1]
        return answer

    def only_response(self) -> InferenceResponse:
        """Blocks until the call is over."""
        response: InferenceResponse | None = None
        while not self._is_over:
            came, _ = self.next()
            response = response or came
        return response or InferenceResponse([], TritonError(_EMPTY))

    def cancel(self) -> None:
        """Idempotent; what is on its way still comes."""
        if not self._is_over:
            self._link.post(("cancel_infer", self._number))

    def when_over(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the last answer is there, now or on the link's thread: it must only enqueue."""
        with self._lock:
            self._on_last = callback
            is_over = self._has_last
        if is_over:
            callback()

    def _take(self, value: Any, parts: Sequence[Any], is_last: bool) -> None:
        self._answers.put((None if value is None else InferenceResponse._unpack(value, parts), is_last))
        if not is_last:
            return
        with self._lock:
            self._has_last, callback = True, self._on_last
        if callback is not None:
            callback()


class ResponseIterator:
    """The responses of a decoupled model, as they come; the last one may be empty. It can be walked once."""

    def __init__(self, call: InnerCall) -> None:
        self._call = call
        self._is_over = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._is_over:
            raise StopIteration
        response, self._is_over = self._call.next()
        return response or InferenceResponse()

    def cancel(self) -> None:
        """Asks the other model to stop; the iterator still ends with its last response."""
        self._call.cancel()

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            with contextlib.suppress(OSError):
                self._call.cancel()


def only_response_of(call: InnerCall, loop: asyncio.AbstractEventLoop) -> asyncio.Future[InferenceResponse]:
    """The one response, for the running event loop; cancelling the future cancels the call."""
    future: asyncio.Future[InferenceResponse] = loop.create_future()

    def settle() -> None:
        if not future.done():
            future.set_result(call.only_response())

    def on_done(done: asyncio.Future[InferenceResponse]) -> None:
        if done.cancelled():
            call.cancel()

    def on_last() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed since
            loop.call_soon_threadsafe(settle)

    future.add_done_callback(on_done)
    call.when_over(on_last)
    return future
