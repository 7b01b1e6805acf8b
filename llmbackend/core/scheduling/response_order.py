"""Responses in the order of their requests: `dynamic_batching { preserve_ordering: true }`.

For: models whose clients match answers to requests by order. Does not know: batches, what a response holds. Invariants:
a request's responses are passed on only when every earlier request has ended; a request that is refused while it waits
in the queue (its time is over, it was cancelled) leaves the line and is answered at once, as in Triton; within the line
nothing is dropped or changed.
Source: DelegateResponse and FinalizeResponses in Triton's dynamic_batch_scheduler.cc. By design stricter: a request has
its place from the moment it is enqueued, so that an answer from the response cache does not overtake queued requests.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from functools import partial

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.messages import InferenceResponse, ResponseCallback
from llmbackend.core.requests.infer_request import InferRequest

from .scheduler import BatchSource, Scheduler, SchedulerShell


class _Place:
    """One request's place in the line, and what came for it while others were before it."""

    def __init__(self) -> None:
        self.is_queued = True
        self.is_final = False
        self.held: deque[tuple[ResponseCallback, InferenceResponse | None, ResponseFlag]] = deque()

    def pass_on(self) -> None:
        while self.held:
            client, response, flags = self.held.popleft()
            client(response, flags)


class ResponseOrder(SchedulerShell):
    """Locks: `_entry` makes the line's order the queue's; `_lock` guards the line, and is held while responses are
    passed on, which only enqueues them. A response channel's lock may be held when `_lock` is taken, never the other
    way. What the line holds is bounded by what the requests in flight produce."""

    def __init__(self, inner: Scheduler) -> None:
        super().__init__(inner)
        self._entry = threading.RLock()
        self._lock = threading.RLock()
        self._line: OrderedDict[_Place, None] = OrderedDict()

    def enqueue(self, request: InferRequest) -> None:
        if isinstance(request.place, _Place):
            return super().enqueue(request)  # the backend gave it back; it has its place
        place = request.place = _Place()
        if not request.channel.intercept(lambda client: partial(self._arrived, place, client)):
            return super().enqueue(request)  # its client was answered already, by a server that stops
        with self._entry:
            with self._lock:
                self._line[place] = None
            try:
                super().enqueue(request)
            except BaseException:
                with self._lock:
                    self._leave(place)
                raise

    def source(self, instance: str) -> BatchSource:
        return _MarkingSource(super().source(instance))

    def left_behind(self) -> Mapping[str, int]:
        return {**super().left_behind(), "requests in the line for its responses": len(self._line)}

    def _arrived(
        self, place: _Place, client: ResponseCallback, response: InferenceResponse | None, flags: ResponseFlag
    ) -> None:
        with self._lock:
            place.held.append((client, response, flags))
            place.is_final = bool(flags & ResponseFlag.FINAL)
            if place.is_queued and response is not None and response.error is not None:
                self._leave(place)
            else:
                self._pass_on()

    def _leave(self, place: _Place) -> None:
        """Out of turn. Holds the lock."""
        self._line.pop(place, None)
        place.pass_on()
        self._pass_on()

    def _pass_on(self) -> None:
        """Delivers from the front as far as possible. Holds the lock."""
        while self._line:
            first = next(iter(self._line))
            first.pass_on()
            if not first.is_final:
                return
            self._line.pop(first, None)


class _MarkingSource:
    """The inner source; an error of a request that it gave to an instance is an answer, which waits for its turn."""

    def __init__(self, inner: BatchSource) -> None:
        self._inner = inner

    def next_batch(self) -> list[InferRequest] | None:
        batch = self._inner.next_batch()
        return None if batch is None else _taken(batch)

    def wait_for_batch(self) -> bool:
        return self._inner.wait_for_batch()

    def take_batch(self) -> list[InferRequest]:
        return _taken(self._inner.take_batch())


def _taken(batch: list[InferRequest]) -> list[InferRequest]:
    for request in batch:
        if isinstance(request.place, _Place):
            request.place.is_queued = False
    return batch
