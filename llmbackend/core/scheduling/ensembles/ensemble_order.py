"""The order in which an ensemble's responses leave, when its last steps do not end in the order in which they began.

For: EnsembleRun, whose lock guards it. Does not know: tensors, models. Invariant: a response leaves as soon as no step
that still runs can make one of an earlier origin, and not before; so a stream is in order whatever the number of
instances behind a decoupled step.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from typing import Protocol

from .ensemble_values import Origin, Value

Outputs = Mapping[str, Value]


class Runs(Protocol):
    """A step that runs, or ran."""

    @property
    def next_origin(self) -> Origin:
        """The earliest origin that what it still makes can have; it only grows."""

    @property
    def is_over(self) -> bool: ...


class OriginOrder:
    def __init__(self) -> None:
        self._complete: list[tuple[Origin, int, Outputs]] = []
        self._running: list[tuple[Origin, int, Runs]] = []  # by the origin that they had when they were last looked at
        self._ticks = itertools.count()

    def __len__(self) -> int:
        """How many responses have not left."""
        return len(self._complete)

    def clear(self) -> None:
        """Lets go of the steps, which hold the run that holds this."""
        self._running.clear()

    def begin(self, step: Runs) -> None:
        heapq.heappush(self._running, (step.next_origin, next(self._ticks), step))

    def add(self, origin: Origin, outputs: Outputs) -> None:
        heapq.heappush(self._complete, (origin, next(self._ticks), outputs))

    def pop(self, before: Origin | None = None) -> Outputs | None:
        """The next response, if it may leave, and if its origin is earlier than `before`."""
        if not self._complete:
            return None
        origin = self._complete[0][0]
        if (before is not None and origin >= before) or self.may_come_before(origin):
            return None
        return heapq.heappop(self._complete)[2]

    def may_come_before(self, origin: Origin) -> bool:
        """Whether a step that runs can still make something of an earlier origin."""
        earliest = self._earliest_to_come()
        return earliest is not None and earliest < origin

    def _earliest_to_come(self) -> Origin | None:
        while self._running:
            origin, tick, step = self._running[0]
            if step.is_over:
                heapq.heappop(self._running)
            elif step.next_origin != origin:
                heapq.heapreplace(self._running, (step.next_origin, tick, step))
            else:
                return origin
        return None
