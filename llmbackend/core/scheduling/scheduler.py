"""What instance threads and a model need of a scheduler.

For: every scheduler, Model, InstanceThread. Does not know: how requests are ordered. Invariant: a request that was
enqueued either comes out of a source's `next_batch` once, or was completed with an error. (With iterative sequences a
backend may give it back, and it comes out again.)
"""

from __future__ import annotations

from typing import Protocol

from llmbackend.core.infer_request import InferRequest


class BatchSource(Protocol):
    """Where the thread of an instance takes its batches."""

    def next_batch(self) -> list[InferRequest] | None:
        """Blocks until there is a batch for the calling instance; None when stopped and empty."""


class Scheduler(Protocol):
    def __len__(self) -> int:
        """How many requests are queued."""

    def enqueue(self, request: InferRequest) -> None:
        """Takes the request over. Raises TritonError, and leaves it with the caller, when it is refused."""

    def source(self, instance: str) -> BatchSource:
        """The source of the instance with that name, asked for once, before its thread starts."""

    def stop(self) -> None:
        """Refuses new requests; every source's `next_batch` returns None once its queue is empty."""
