"""One inference that a model runs on another model (BLS).

Invariants: a call is cancelled in the host if its task is cancelled, or its iterator is dropped before its end; as in
Triton, a refusal is a response with an error rather than an exception; an event loop that awaits a response runs other
coroutines meanwhile.
Source: python_backend's request executor and iterator; `async for` is an addition.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import TritonError
from .host_link import HostLink
from .pb_response import InferenceResponse

if TYPE_CHECKING:
    import asyncio  # imported only by models that await

_Answer = tuple[InferenceResponse | None, bool]
"""The response, if any, and whether the call has ended."""
_EMPTY = "Unexpected empty response."
T = TypeVar("T")


class BlsCall:
    def __init__(self, link: HostLink, request: dict[str, Any], parts: Sequence[Any], is_stream: bool) -> None:
        self._link = link
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._is_over = False
        self._lock = threading.Lock()
        self._has_last = False
        self._watchers: list[tuple[bool, Callable[[], None]]] = []
        self._number = link.start(("infer", is_stream, request), parts, self._take)

    def next(self) -> _Answer:
        """Blocks until the next answer."""
        answer = self._answers.get()
        self._is_over = answer[1]
        return answer

    def only_response(self) -> InferenceResponse:
        """Blocks until the call has ended."""
        response: InferenceResponse | None = None
        while not self._is_over:
            came, _ = self.next()
            response = response or came
        return response or InferenceResponse([], TritonError(_EMPTY))

    def cancel(self) -> None:
        """Idempotent. Answers in flight still arrive."""
        if not self._is_over:
            self._link.post(("cancel_infer", self._number))

    def when_answered(self, callback: Callable[[], None], *, is_over: bool = False) -> None:
        """Calls `callback` when an answer has arrived (with `is_over`: the last one): immediately, or on the link's
        thread, where it must only enqueue."""
        with self._lock:
            is_waiting = not (self._has_last or (not is_over and not self._answers.empty()))
            if is_waiting:
                self._watchers.append((is_over, callback))
        if not is_waiting:
            callback()

    def _take(self, value: Any, parts: Sequence[Any], is_last: bool) -> None:
        self._answers.put((None if value is None else InferenceResponse._unpack(value, parts), is_last))
        with self._lock:
            self._has_last = is_last
            due = [callback for is_over, callback in self._watchers if is_last or not is_over]
            self._watchers = [] if is_last else [watcher for watcher in self._watchers if watcher[0]]
        for callback in due:
            callback()


class ResponseIterator:
    """The responses of a decoupled model as they arrive; the last one may be empty. After its end it can be iterated
    again. In a coroutine, `async for` lets others run while it waits; `for` does not."""

    def __init__(self, call: BlsCall) -> None:
        self._call = call
        self._responses: list[InferenceResponse] = []
        self._position = 0
        self._is_over = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        self._rewind()
        return self

    def __next__(self) -> InferenceResponse:
        if self._position == len(self._responses):
            if self._is_over:
                raise StopIteration
            response, self._is_over = self._call.next()
            self._responses.append(response or InferenceResponse())
        self._position += 1
        return self._responses[self._position - 1]

    def __aiter__(self) -> ResponseIterator:
        self._rewind()
        return self

    async def __anext__(self) -> InferenceResponse:
        import asyncio

        if self._position == len(self._responses) and not self._is_over:
            answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            _settle_when_answered(self._call, answered, lambda: None)
            await answered
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self) -> None:
        """Asks the other model to stop. The iterator still ends with the last response."""
        self._call.cancel()

    def _rewind(self) -> None:
        if self._is_over and self._position == len(self._responses):
            self._position = 0

    def __del__(self) -> None:
        if not getattr(self, "_is_over", True):
            with contextlib.suppress(OSError):
                self._call.cancel()


def only_response_of(call: BlsCall, loop: asyncio.AbstractEventLoop) -> asyncio.Future[InferenceResponse]:
    """The only response, as a future of the running event loop; cancelling the future cancels the call."""
    future: asyncio.Future[InferenceResponse] = loop.create_future()
    return _cancelling(call, _settle_when_answered(call, future, call.only_response, is_over=True))


def responses_of(call: BlsCall, loop: asyncio.AbstractEventLoop) -> asyncio.Future[ResponseIterator]:
    """The responses, as a future of the running event loop that completes with the first one; cancelling it cancels
    them."""
    future: asyncio.Future[ResponseIterator] = loop.create_future()
    return _cancelling(call, _settle_when_answered(call, future, lambda: ResponseIterator(call)))


def _settle_when_answered(
    call: BlsCall, future: asyncio.Future[T], result: Callable[[], T], *, is_over: bool = False
) -> asyncio.Future[T]:
    """Sets the future's result on the future's event loop."""

    def settle() -> None:
        if not future.done():
            future.set_result(result())

    def on_answer() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            future.get_loop().call_soon_threadsafe(settle)

    call.when_answered(on_answer, is_over=is_over)
    return future


def _cancelling(call: BlsCall, future: asyncio.Future[T]) -> asyncio.Future[T]:
    def on_done(done: asyncio.Future[T]) -> None:
        if done.cancelled():
            call.cancel()

    future.add_done_callback(on_done)
    return future
