"""What instance threads and a model need of a scheduler.

For: every scheduler, Model, InstanceThread. Does not know: how requests are ordered. Invariant: an enqueued request
either comes out of a source once, or was completed. (In iterative sequences a backend may reschedule it; then it comes
out again.)
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from typing import Protocol, runtime_checkable

from llmbackend.core.requests.queued_request import QueuedRequest


class Batches(Protocol):
    """The batches that an instance's thread executes."""

    def next_batch(self) -> list[QueuedRequest] | None:
        """Blocks until there is a batch for the calling instance; None when stopped and empty."""


class BatchSource(Batches, Protocol):
    """Source of an instance's batches: in one step, or in two when something else is needed before a batch may leave
    the queue (resources of the rate limiter)."""

    def wait_for_batch(self) -> bool:
        """Blocks until `take_batch` would have one; False when stopped and empty."""

    def take_batch(self) -> list[QueuedRequest]:
        """The batch that is ready now; empty when there is none (any more)."""


@runtime_checkable
class ElasticSource(BatchSource, Protocol):
    """A source whose instances may be added and removed while it serves."""

    def admit(self) -> None:
        """The instance is ready: from now on requests may be bound to it."""

    def dismiss(self, thread: Thread) -> bool:
        """Tells the instance's thread that there are no more batches; queued requests stay for the others. Returns
        True when something is bound to the instance (a running sequence): then the thread is told when that is over."""


class Scheduler(Protocol):
    def __len__(self) -> int:
        """How many requests are queued."""

    def enqueue(self, request: QueuedRequest) -> None:
        """Takes over the request. Raises TritonError, and leaves it with the caller, when it is refused."""

    def source(self) -> BatchSource:
        """The source of one more instance. Called once for each, before its thread starts."""

    def stop(self) -> None:
        """Refuses new requests; every source's `next_batch` returns None once its queue is empty."""

    def leaked_resources(self) -> Mapping[str, int]:
        """Counts that are 0 whenever no request is in flight."""


class DelegatingScheduler:
    """A scheduler around another, to which it delegates what a subclass does not override."""

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
