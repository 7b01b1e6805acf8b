"""What instance threads and a model need of a scheduler.

For: every scheduler, Model, InstanceThread. Does not know: how requests are ordered. Invariant: a request that was
enqueued either comes out of a source once, or was completed. (With iterative sequences a backend may give it back, and
it comes out again.)
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Thread
from typing import Protocol, runtime_checkable

from llmbackend.core.requests.infer_request import InferRequest


class Batches(Protocol):
    """What the thread of an instance executes."""

    def next_batch(self) -> list[InferRequest] | None:
        """Blocks until there is a batch for the calling instance; None when stopped and empty."""


class BatchSource(Batches, Protocol):
    """Where an instance's batches come from: at once, or, where something else is needed before the batch may leave the
    queue (the rate limiter's resources), in two steps."""

    def wait_for_batch(self) -> bool:
        """Blocks until `take_batch` would have one; False when stopped and empty."""

    def take_batch(self) -> list[InferRequest]:
        """The batch that is ready now; empty when there is none (any more)."""


@runtime_checkable
class ElasticSource(BatchSource, Protocol):
    """A source whose instances may come and go while it serves."""

    def admit(self) -> None:
        """The instance is ready: from now on it may be given what is bound to it."""

    def dismiss(self, thread: Thread) -> bool:
        """Has the instance's thread, at once when it waits, be told that there are no more batches; what is queued
        stays for the others. True when something is bound to the instance (a sequence that runs): then it is told when
        that is over."""


class Scheduler(Protocol):
    def __len__(self) -> int:
        """How many requests are queued."""

    def enqueue(self, request: InferRequest) -> None:
        """Takes the request over. Raises TritonError, and leaves it with the caller, when it is refused."""

    def source(self, instance: str) -> BatchSource:
        """The source of the instance with that name, asked for once, before its thread starts."""

    def stop(self) -> None:
        """Refuses new requests; every source's `next_batch` returns None once its queue is empty."""

    def left_behind(self) -> Mapping[str, int]:
        """Counts that are 0 whenever no request is in flight."""


class SchedulerShell:
    """A scheduler around another: everything is the inner one's, but for what a subclass adds."""

    def __init__(self, inner: Scheduler) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return len(self._inner)

    def enqueue(self, request: InferRequest) -> None:
        self._inner.enqueue(request)

    def source(self, instance: str) -> BatchSource:
        return self._inner.source(instance)

    def stop(self) -> None:
        self._inner.stop()

    def left_behind(self) -> Mapping[str, int]:
        return self._inner.left_behind()
