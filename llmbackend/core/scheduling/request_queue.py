"""The request queue of one model version, ordered by priority level and arrival; and the default scheduler.

Invariants: each queued request leaves in a batch or is completed with an error, immediately if cancelled or expired; no
operation iterates over the queue. Source: Triton's default scheduler and PriorityQueue (scheduler_utils.cc); golden
transcript 58.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from weakref import WeakSet

from llmbackend.waiting.level_queue import LevelQueue
from llmbackend.waiting.queue_policy import QueuePolicies
from llmbackend.waiting.timer import Deadlines, Timer

from ..errors import TritonError, cancelled, request_tag, unavailable
from ..metrics.model_metrics import FailureReason, Statistics
from ..requests.queued_request import QueuedRequest
from .scheduler import BatchSource


class PriorityQueue(LevelQueue[QueuedRequest]):
    """A queue with limits and deadlines per level. Guarded by RequestQueue's lock."""

    def __init__(self, policies: QueuePolicies) -> None:
        super().__init__()
        self._policies = policies
        self._deadlines: Deadlines[QueuedRequest] = Deadlines()

    def enqueue(self, request: QueuedRequest) -> None:
        """Raises TritonError UNAVAILABLE if the request's level is full."""
        level = self._policies.level(request.priority)
        policy = self._policies.policy(level)
        if policy.max_queue_size and self.num_in_level(level) >= policy.max_queue_size:
            raise unavailable(f"{request_tag(request.id)}Exceeds maximum queue size")
        self.append(request, level)
        if deadline_ns := policy.deadline_ns(request.queue_start_ns, request.timeout_us):
            self._deadlines.add(request, deadline_ns)

    def remove(self, request: QueuedRequest) -> bool:
        self._deadlines.discard(request)
        return super().remove(request)

    def next_deadline_ns(self) -> int | None:
        return self._deadlines.earliest_ns()

    def take_expired(self, now_ns: int) -> list[QueuedRequest]:
        """Removes and returns the expired requests that are to be rejected; moves those to be delayed behind the others
        of their level."""
        rejected = []
        for request in self._deadlines.pop_due(now_ns):
            if self._policies.policy(self._policies.level(request.priority)).reject:
                self.remove(request)
                rejected.append(request)
            else:
                self.delay(request)
        return rejected


class RequestQueue:
    """The default scheduler: one request per Execute, one queue for all instances. Client callbacks run outside its
    lock. Expired requests are answered even while all instances are busy."""

    def __init__(self, policies: QueuePolicies, statistics: Statistics, timer: Timer) -> None:
        self._policies = policies
        self._statistics = statistics
        self._timer = timer
        self._changed = threading.Condition(threading.Lock())
        self._queue = PriorityQueue(policies)
        self._alarm_ns: int | None = None
        self._stopped = False
        self._dismissed: WeakSet[threading.Thread] = WeakSet()  # a thread that has ended never asks

    def __len__(self) -> int:
        return len(self._queue)

    def enqueue(self, request: QueuedRequest) -> None:
        """Raises TritonError UNAVAILABLE if full or stopped; see Scheduler."""
        request.batcher_start_ns = time.monotonic_ns()
        request.queue_start_ns = request.queue_start_ns or request.batcher_start_ns  # set if of a sequence
        request.priority = self._policies.priority(request.priority)
        request.channel.set_dequeue(partial(self._cancel, request))
        try:
            with self._changed:
                if self._stopped:
                    raise unavailable(
                        f"{request_tag(request.id)}Server is stopping, scheduler for model has stopped accepting new "
                        f"inference requests"
                    )
                self._queue.enqueue(request)
                self._statistics.add_pending(1)
                self._set_alarm()
                self._changed.notify()
        except TritonError:
            request.channel.set_dequeue(None)
            raise
        if request.is_cancelled:
            self._cancel(request)  # cancelled before it was queued

    def source(self) -> BatchSource:
        return self

    def next_batch(self) -> list[QueuedRequest] | None:
        return self._await_batch(take=True)

    def wait_for_batch(self) -> bool:
        return self._await_batch(take=False) is not None

    def take_batch(self) -> list[QueuedRequest]:
        with self._changed:
            count, _ = self._ready_count() if self._queue else (0, None)
            batch = self._pop(count)
            if self._queue:
                self._changed.notify()
        for request in batch:
            self._left_queue(request)
        return batch

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._timer.clear(self._expire)

    def admit(self) -> None:
        """Requests are not bound to instances."""

    def dismiss(self, thread: threading.Thread) -> bool:
        with self._changed:
            self._dismissed.add(thread)
            self._changed.notify_all()
        return False

    def leaked_resources(self) -> Mapping[str, int]:
        return {"requests in its queue": len(self)}

    def _await_batch(self, take: bool) -> list[QueuedRequest] | None:
        """Waits until a batch is ready, and returns it ([] if not `take`). Returns None if the queue is stopped and
        empty, or the calling thread was dismissed."""
        while True:
            with self._changed:
                if self._was_dismissed():
                    return None
                expired = self._queue.take_expired(time.monotonic_ns())
                count, wait_s = self._ready_count() if self._queue else (0, None)
                batch = self._pop(count) if take else []
                if not expired and not count:
                    if self._stopped and not self._queue:
                        return None
                    self._changed.wait(wait_s)
                elif self._queue:
                    self._changed.notify()  # another instance, which may sleep without a timeout, can take the rest
            self._reject(expired)
            for request in batch:
                self._left_queue(request)
            if count:
                return batch

    def _was_dismissed(self) -> bool:
        """Whether the calling thread was dismissed; True only once. The caller holds the lock."""
        if not self._dismissed or threading.current_thread() not in self._dismissed:
            return False
        self._dismissed.discard(threading.current_thread())
        self._changed.notify()  # the wake-up may have been meant for another thread
        return True

    def _pop(self, count: int) -> list[QueuedRequest]:
        return [self._queue.pop_first() for _ in range(count)]

    def _ready_count(self) -> tuple[int, float | None]:
        """The number of requests in the next batch, or 0 and how many seconds to wait for more (None = no limit). The
        queue must not be empty. The caller holds the lock."""
        return 1, None

    def _set_alarm(self) -> None:
        """Sets an alarm for the earliest deadline. The caller holds the lock."""
        due_ns = self._queue.next_deadline_ns()
        if due_ns is not None and (self._alarm_ns is None or due_ns < self._alarm_ns):
            self._alarm_ns = due_ns
            self._timer.set(self._expire, due_ns)

    def _expire(self) -> None:
        """Called on the timer's thread."""
        with self._changed:
            expired = self._queue.take_expired(time.monotonic_ns())
            self._alarm_ns = None
            if not self._stopped:
                self._set_alarm()
            self._changed.notify()  # the rest may now form a batch
        self._reject(expired)

    def _reject(self, expired: list[QueuedRequest]) -> None:
        for request in expired:
            self._left_queue(request)
            request.fail(unavailable("Request timeout expired"), FailureReason.REJECTED)

    def _cancel(self, request: QueuedRequest) -> None:
        """Called on the cancelling thread. Requests already given to an instance are cancelled by the backend."""
        with self._changed:
            if not self._queue.remove(request):
                return
            self._changed.notify()  # the rest may now form a batch
        self._left_queue(request)
        request.fail(cancelled("Request cancelled"), FailureReason.CANCELED)

    def _left_queue(self, request: QueuedRequest) -> None:
        self._statistics.add_pending(-1)
        request.channel.set_dequeue(None)
