"""The interface of schedulers for models and instance threads; and the ordering of responses.

An enqueued request either leaves through a source exactly once or is completed. (A backend may reschedule requests of
iterative sequences; they then leave again.)
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import partial
from threading import Thread
from typing import Protocol, runtime_checkable

from ..backend_api import ResponseFlag
from ..messages import InferenceResponse, ResponseCallback
from ..requests.queued_request import QueuedRequest


class Batches(Protocol):
    def next_batch(self) -> list[QueuedRequest] | None:
        """Blocks until there is a batch for the calling thread. Returns None if there will be no more."""


class BatchSource(Batches, Protocol):
    """The source of an instance's batches: in one step, or in two if the rate limiter's resources are needed before a
    batch may leave the queue."""

    def wait_for_batch(self) -> bool:
        """Blocks until `take_batch` would return a batch. Returns False if there will be no more."""

    def take_batch(self) -> list[QueuedRequest]:
        """The batch that is ready now; [] = none."""


@runtime_checkable
class ElasticSource(BatchSource, Protocol):
    """A source whose instances can be added and removed while it serves."""

    def admit(self) -> None:
        """Called when the instance is ready for requests."""

    def dismiss(self, thread: Thread) -> bool:
        """Ends the batches of the instance's thread; queued requests remain for the others. Returns True if a running
        sequence is bound to the instance: the batches then end after that sequence."""


class Scheduler(Protocol):
    def __len__(self) -> int:
        """The number of queued requests."""

    def enqueue(self, request: QueuedRequest) -> None:
        """Takes over the request. If it is refused, raises TritonError and leaves the request with the caller."""

    def source(self) -> BatchSource:
        """A source for one more instance, created before its thread starts."""

    def stop(self) -> None:
        """Refuses new requests. Each source's `next_batch` returns None once its queue is empty."""

    def leaked_resources(self) -> Mapping[str, int]:
        """Counts that are 0 whenever no request is in flight."""


class DelegatingScheduler:
    """A scheduler that wraps another one."""

    def __init__(self, inner: Scheduler) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def enqueue(self, request: QueuedRequest) -> None:
        self._inner.enqueue(request)

    def source(self) -> BatchSource:
        return self._inner.source()

    def stop(self) -> None:
        self._inner.stop()

    def leaked_resources(self) -> Mapping[str, int]:
        return self._inner.leaked_resources()


class _OrderedRequest:
    """One request in the order, and its responses that wait for earlier requests to end."""

    def __init__(self) -> None:
        self.is_queued = True
        self.is_final = False
        self.held: deque[tuple[ResponseCallback, InferenceResponse | None, ResponseFlag]] = deque()

    def pass_on(self) -> None:
        while self.held:
            client, response, flags = self.held.popleft()
            client(response, flags)


class ResponseOrder(DelegatingScheduler):
    """Sends responses in the order of requests (`preserve_ordering`).

    A request that fails while queued (timeout, cancel) leaves the order and is answered immediately, as in Triton.
    Deliberately stricter: a request takes its place when it is enqueued, so that responses from the response cache do
    not overtake queued requests.

    Locks: `_enqueue_lock` gives the order and the queue the same sequence. `_lock` guards the order and is held while
    responses are sent, which only enqueues them. A channel's lock may be held when `_lock` is taken, never vice versa.
    """

    def __init__(self, inner: Scheduler) -> None:
        super().__init__(inner)
        self._enqueue_lock = threading.RLock()
        self._lock = threading.RLock()
        self._order: OrderedDict[_OrderedRequest, None] = OrderedDict()

    def enqueue(self, request: QueuedRequest) -> None:
        if isinstance(request.order_entry, _OrderedRequest):
            return super().enqueue(request)  # rescheduled requests keep their place
        entry = request.order_entry = _OrderedRequest()
        if not request.channel.wrap_callback(lambda client: partial(self._on_response, entry, client)):
            return super().enqueue(request)  # already answered, because the server is stopping
        with self._enqueue_lock:
            with self._lock:
                self._order[entry] = None
            try:
                super().enqueue(request)
            except BaseException:
                with self._lock:
                    self._leave(entry)
                raise

    def source(self) -> BatchSource:
        return _MarkingSource(super().source())

    def leaked_resources(self) -> Mapping[str, int]:
        return {**super().leaked_resources(), "requests in the line for its responses": len(self._order)}

    def _on_response(
        self, entry: _OrderedRequest, client: ResponseCallback, response: InferenceResponse | None, flags: ResponseFlag
    ) -> None:
        with self._lock:
            entry.held.append((client, response, flags))
            entry.is_final = bool(flags & ResponseFlag.FINAL)
            if entry.is_queued and response is not None and response.error is not None:
                self._leave(entry)
            else:
                self._pass_on()

    def _leave(self, entry: _OrderedRequest) -> None:
        """Sends a request's responses out of order. The caller holds the lock."""
        self._order.pop(entry, None)
        entry.pass_on()
        self._pass_on()

    def _pass_on(self) -> None:
        """Sends responses, starting with the first request, as far as possible. The caller holds the lock."""
        while self._order:
            first = next(iter(self._order))
            first.pass_on()
            if not first.is_final:
                return
            self._order.pop(first, None)


class _MarkingSource:
    """Wraps a source and marks the requests that an instance receives; their errors stay in order."""

    def __init__(self, inner: BatchSource) -> None:
        self._inner = inner

    def next_batch(self) -> list[QueuedRequest] | None:
        batch = self._inner.next_batch()
        return None if batch is None else _taken(batch)

    def wait_for_batch(self) -> bool:
        return self._inner.wait_for_batch()

    def take_batch(self) -> list[QueuedRequest]:
        return _taken(self._inner.take_batch())


def _taken(batch: list[QueuedRequest]) -> list[QueuedRequest]:
    for request in batch:
        if isinstance(request.order_entry, _OrderedRequest):
            request.order_entry.is_queued = False
    return batch
