"""A request of a sequence while it is out of its queue: what its release means for the sequence.

For: InferRequest, which calls it, and the sequence batcher, which acts on it. Does not know: slots, queues.
Invariants: `done` is called exactly once for each step that was not rescheduled; a step references no request, so that
one that a backend lost is found. Source: the release callbacks of Triton's sequence batcher.
"""

from __future__ import annotations

from typing import Protocol

from llmbackend.core.requests.infer_request import InferRequest

from .sequence import Sequence


class StepOwner(Protocol):
    def step_done(self, step: Step) -> None:
        """The request was released for good."""

    def reschedule(self, step: Step, request: InferRequest) -> None:
        """Takes the request back. Raises TritonError INVALID_ARG, and leaves it with the backend."""


class Step:
    """`is_tracked`: the slot waits for the release. `was_handed_out`: an instance got the request."""

    def __init__(self, owner: StepOwner, sequence: Sequence, is_tracked: bool) -> None:
        self.sequence = sequence
        self.is_tracked = is_tracked
        self.was_handed_out = False
        self._owner = owner

    def done(self) -> None:
        self._owner.step_done(self)

    def reschedule(self, request: InferRequest) -> None:
        self._owner.reschedule(self, request)


def step_of(request: InferRequest) -> Step:
    assert isinstance(request.step, Step), "a request of a sequence that is out of its queue has a step"
    return request.step
