"""The queue between a frontend and the instances of one model version, and the default scheduler on top of it.

For: Model (enqueue, stop) and instance threads (next_batch). Does not know: what a request holds, how it is executed.
Owner of the queued requests: each leaves either in a batch or completed with an error. Invariants: the queue never
grows beyond its policy; a cancelled request leaves at once; client callbacks run outside the queue's lock.
Source: Triton's default scheduler and queue policies; golden transcript 58.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

from tritonclient.grpc.model_config_pb2 import ModelQueuePolicy

from llmbackend.core.errors import TritonError, cancelled, request_tag, unavailable
from llmbackend.core.infer_request import InferRequest
from llmbackend.core.statistics import FailureReason, Statistics


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """max_queue_size 0 = no bound; timeout_us 0 = none. With `reject`, a request that waited longer fails; without, it
    is served after those that did not."""

    max_queue_size: int = 0
    timeout_us: int = 0
    reject: bool = True
    allow_timeout_override: bool = False

    @classmethod
    def of(cls, message: ModelQueuePolicy) -> QueuePolicy:
        return cls(
            message.max_queue_size,
            message.default_timeout_microseconds,
            message.timeout_action == ModelQueuePolicy.REJECT,
            message.allow_timeout_override,
        )

    def deadline_ns(self, request: InferRequest) -> int:
        """When the request's time in the queue is over; 0 = never. A request may only shorten it."""
        timeout_us = self.timeout_us
        if self.allow_timeout_override and request.timeout_us:
            timeout_us = min(request.timeout_us, timeout_us or request.timeout_us)
        return request.queue_start_ns + timeout_us * 1000 if timeout_us else 0


class RequestQueue:
    """The default scheduler: first in, first out, one request per Execute, shared by all instances."""

    def __init__(self, policy: QueuePolicy, statistics: Statistics) -> None:
        self._policy = policy
        self._statistics = statistics
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[InferRequest] = deque()
        self._delayed: deque[InferRequest] = deque()
        self._stopped = False

    def enqueue(self, request: InferRequest) -> None:
        """Takes the request over. Raises TritonError UNAVAILABLE, and leaves it with the caller, when full or
        stopped.
        """
        request.queue_start_ns = time.monotonic_ns()
        request.deadline_ns = self._policy.deadline_ns(request)
        request.channel.set_dequeue(partial(self._cancel, request))
        try:
            with self._changed:
                self._check_accepts(request)
                self._statistics.add_pending(1)
                self._queue.append(request)
                self._changed.notify()
        except TritonError:
            request.channel.set_dequeue(None)
            raise

    def next_batch(self) -> list[InferRequest] | None:
        """Blocks until there is a batch for the calling instance; None when stopped and empty."""
        while True:
            with self._changed:
                expired = self._take_expired()
                batch, wait_s = self._try_batch()
                if not expired and not batch:
                    if self._stopped and not self._queue:
                        return None
                    self._changed.wait(wait_s)
                elif self._queue:
                    self._changed.notify()  # what is left is for another instance, which may sleep without a timeout
            for request in expired:
                self._leave(request)
                request.fail(unavailable("Request timeout expired"), FailureReason.REJECTED)
            for request in batch:
                self._leave(request)
            if batch:
                return batch

    def stop(self) -> None:
        """Refuses new requests; `next_batch` returns None once the queue is empty."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _try_batch(self) -> tuple[list[InferRequest], float | None]:
        """A batch if there is one; otherwise how long to wait for more (None = for a change). Holds the lock."""
        if not self._queue and self._delayed:
            self._queue.append(self._delayed.popleft())
        return self._form_batch() if self._queue else ([], None)

    def _form_batch(self) -> tuple[list[InferRequest], float | None]:
        """Takes the next batch from the non-empty queue, or says how many seconds to wait for more. Holds the lock."""
        return [self._queue.popleft()], None

    def _take_expired(self) -> list[InferRequest]:
        if not self._policy.timeout_us and not self._policy.allow_timeout_override:
            return []
        now = time.monotonic_ns()
        expired = [request for request in self._queue if 0 < request.deadline_ns <= now]
        for request in expired:
            self._queue.remove(request)
        if self._policy.reject:
            return expired
        for request in expired:
            request.deadline_ns = 0
            self._delayed.append(request)
        return []

    def _check_accepts(self, request: InferRequest) -> None:
        tag = request_tag(request.id)
        if self._stopped:
            raise unavailable(
                f"{tag}Server is stopping, scheduler for model has stopped accepting new inference requests"
            )
        limit = self._policy.max_queue_size
        if limit and len(self._queue) + len(self._delayed) >= limit:
            raise unavailable(f"{tag}Exceeds maximum queue size")

    def _cancel(self, request: InferRequest) -> None:
        """Runs on the canceller's thread; a request that an instance took meanwhile is the backend's to cancel."""
        with self._changed:
            queue = self._queue if request in self._queue else self._delayed
            if request not in queue:
                return
            queue.remove(request)
        self._leave(request)
        request.fail(cancelled("Request cancelled"), FailureReason.CANCELED)

    def _leave(self, request: InferRequest) -> None:
        self._statistics.add_pending(-1)
        request.channel.set_dequeue(None)
