"""RequestTracer: finds in the plans of steps what becomes of requests that are traced.

For: the engine core, which owns it. Does not know: why a plan is as it is. Invariant: while no live request is traced,
a step costs one look at whether there is one.
"""

from __future__ import annotations

from collections.abc import Callable

from ..request_events import EventName, RequestEvent
from ..step import RowTable, StepPlan
from .sequence import Sequence


class RequestTracer:
    """One thread calls it."""

    def __init__(self, table: RowTable, now_s: Callable[[], float]) -> None:
        self._table = table
        self._now_s = now_s
        self._live: dict[str, Sequence] = {}
        self._running: set[str] = set()
        """Of them, those that hold blocks."""
        self._events: list[RequestEvent] = []

    @property
    def is_active(self) -> bool:
        """Whether a live request is traced."""
        return bool(self._live)

    def add(self, sequence: Sequence) -> None:
        self._live[sequence.request.request_id] = sequence

    def forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._running.discard(request_id)

    def happened(self, request_id: str, name: EventName, num_tokens: int = 0) -> None:
        if request_id in self._live:
            self._events.append(RequestEvent(request_id, name, int(self._now_s() * 1e9), num_tokens))

    def planned(self, plan: StepPlan) -> None:
        """A step was planned; before its rows advance."""
        for request_id, sequence in self._live.items():
            if sequence.row < 0:
                continue
            num_tokens = int(plan.num_scheduled_tokens[plan.rows == sequence.row].sum())
            if num_tokens:
                self._running.add(request_id)
                self._computes(sequence, num_tokens)
            elif request_id in self._running and not self._table.num_computed_tokens[sequence.row]:
                self._running.discard(request_id)
                self.happened(request_id, "preempted")

    def take(self) -> tuple[RequestEvent, ...]:
        """The events since the last call."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return tuple(events)

    def _computes(self, sequence: Sequence, num_tokens: int) -> None:
        """A step that only computes the row's last token, and drafts, is no event."""
        row, table = sequence.row, self._table
        computed, known = int(table.num_computed_tokens[row]), int(table.num_tokens[row])
        num_prompt = int(table.num_prompt_tokens[row])
        if known == num_prompt:
            self.happened(sequence.request.request_id, "prefill", num_tokens)
        elif computed < known - 1:
            self.happened(sequence.request.request_id, "recompute", num_tokens)
