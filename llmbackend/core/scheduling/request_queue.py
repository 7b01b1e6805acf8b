"""The queue between a frontend and the instances of one model version, and the default scheduler on top of it.

For: Model (enqueue, stop), instance threads (next_batch) and the timer (expired requests are answered even while every
instance is busy). Does not know: the order of requests (PriorityQueue), what they hold, how they are executed.
Owner of the queued requests: each leaves either in a batch or completed with an error. Invariants: the queue never
grows beyond its policies; a cancelled or expired request leaves at once; client callbacks run outside the queue's lock.
Source: Triton's default scheduler and queue policies; golden transcript 58.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial

from llmbackend.core.errors import TritonError, cancelled, request_tag, unavailable
from llmbackend.core.requests.infer_request import InferRequest
from llmbackend.core.statistics import FailureReason, Statistics
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Timer

from .priority_queue import PriorityQueue
from .scheduler import BatchSource


class RequestQueue:
    """The default scheduler: by priority, then first in, first out; one request per Execute, shared by all
    instances."""

    def __init__(self, policies: QueuePolicies, statistics: Statistics, timer: Timer) -> None:
        self._policies = policies
        self._statistics = statistics
        self._timer = timer
        self._changed = threading.Condition(threading.Lock())
        self._queue = PriorityQueue(policies)
        self._alarm_ns: int | None = None
        self._stopped = False
        self._dismissed: set[threading.Thread] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, request: InferRequest) -> None:
        """Takes the request over. Raises TritonError UNAVAILABLE, and leaves it with the caller, when full or
        stopped.
        """
        request.batcher_start_ns = time.monotonic_ns()
        request.queue_start_ns = request.queue_start_ns or request.batcher_start_ns  # a sequence may have come first
        request.priority = self._policies.priority(request.priority)
        request.channel.set_dequeue(partial(self._cancel, request))
        try:
            with self._changed:
                if self._stopped:
                    raise unavailable(
                        f"{request_tag(request.id)}Server is stopping, scheduler for model has stopped accepting new "
                        f"inference requests"
                    )
                self._queue.append(request)
                self._statistics.add_pending(1)
                self._set_alarm()
                self._changed.notify()
        except TritonError:
            request.channel.set_dequeue(None)
            raise
        if request.is_cancelled:
            self._cancel(request)  # between the callback's registration and the queue

    def source(self, instance: str) -> BatchSource:
        """All instances share the queue."""
        return self

    def next_batch(self) -> list[InferRequest] | None:
        """Blocks until there is a batch for the calling instance; None when stopped and empty, or dismissed."""
        return self._await_batch(take=True)

    def wait_for_batch(self) -> bool:
        """Blocks until `take_batch` would have one; False when stopped and empty, or dismissed."""
        return self._await_batch(take=False) is not None

    def take_batch(self) -> list[InferRequest]:
        """The batch that is ready now; empty when there is none (any more)."""
        with self._changed:
            count, _ = self._ready_count() if self._queue else (0, None)
            batch = self._pop(count)
            if self._queue:
                self._changed.notify()
        for request in batch:
            self._leave(request)
        return batch

    def stop(self) -> None:
        """Refuses new requests; `next_batch` returns None once the queue is empty."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._timer.clear(self._expire)

    def admit(self) -> None:
        """Its thread takes what is queued when it asks for it."""

    def dismiss(self, thread: threading.Thread) -> bool:
        with self._changed:
            self._dismissed.add(thread)
            self._changed.notify_all()
        return False

    def left_behind(self) -> Mapping[str, int]:
        return {"requests in its queue": len(self)}

    def _await_batch(self, take: bool) -> list[InferRequest] | None:
        """Waits until a batch is ready and gives it, or, unless `take`, an empty list; None when stopped and empty, or
        when the calling thread was dismissed."""
        while True:
            with self._changed:
                if self._leaves():
                    return None
                expired = self._queue.take_expired(time.monotonic_ns())
                count, wait_s = self._ready_count() if self._queue else (0, None)
                batch = self._pop(count) if take else []
                if not expired and not count:
                    if self._stopped and not self._queue:
                        return None
                    self._changed.wait(wait_s)
                elif self._queue:
                    self._changed.notify()  # what is left is for another instance, which may sleep without a timeout
            self._reject(expired)
            for request in batch:
                self._leave(request)
            if count:
                return batch

    def _leaves(self) -> bool:
        """Whether the calling thread was dismissed. Holds the lock."""
        if not self._dismissed or threading.current_thread() not in self._dismissed:
            return False
        self._dismissed.discard(threading.current_thread())
        self._changed.notify()  # what woke this thread may have been meant for any
        return True

    def _pop(self, count: int) -> list[InferRequest]:
        return [self._queue.pop_first() for _ in range(count)]

    def _ready_count(self) -> tuple[int, float | None]:
        """How many requests of the non-empty queue make the next batch, or 0 and the seconds to wait for more. Holds
        the lock."""
        return 1, None

    def _set_alarm(self) -> None:
        """One alarm for the earliest deadline; a later one is set when it rings. Holds the lock."""
        due_ns = self._queue.next_deadline_ns()
        if due_ns is not None and (self._alarm_ns is None or due_ns < self._alarm_ns):
            self._alarm_ns = due_ns
            self._timer.set(self._expire, due_ns)

    def _expire(self) -> None:
        """On the timer's thread."""
        with self._changed:
            expired = self._queue.take_expired(time.monotonic_ns())
            self._alarm_ns = None
            if not self._stopped:
                self._set_alarm()
            self._changed.notify()  # what is left may be a batch now
        self._reject(expired)

    def _reject(self, expired: list[InferRequest]) -> None:
        for request in expired:
            self._leave(request)
            request.fail(unavailable("Request timeout expired"), FailureReason.REJECTED)

    def _cancel(self, request: InferRequest) -> None:
        """Runs on the canceller's thread; a request that an instance took meanwhile is the backend's to cancel."""
        with self._changed:
            if not self._queue.remove(request):
                return
            self._changed.notify()  # what is left may be a batch now
        self._leave(request)
        request.fail(cancelled("Request cancelled"), FailureReason.CANCELED)

    def _leave(self, request: InferRequest) -> None:
        self._statistics.add_pending(-1)
        request.channel.set_dequeue(None)
