"""What instance threads and a model need of a scheduler.

For: every scheduler, Model, InstanceThread. Does not know: how requests are ordered. Invariant: a request that was
enqueued either comes out of `next_batch` once, or was completed with an error.
"""

from __future__ import annotations

from typing import Protocol

from llmbackend.core.infer_request import InferRequest


class Scheduler(Protocol):
    def __len__(self) -> int:
        """How many requests are queued."""

    def enqueue(self, request: InferRequest) -> None:
        """Takes the request over. Raises TritonError, and leaves it with the caller, when it is refused."""

    def next_batch(self) -> list[InferRequest] | None:
        """Blocks until there is a batch for the calling instance; None when stopped and empty."""

    def stop(self) -> None:
        """Refuses new requests; `next_batch` returns None once the queue is empty."""
