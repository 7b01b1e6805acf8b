"""Where the machine puts what it has recognised; numbers the tool calls.

For: the machine's parts. Does not know: formats. Invariant: a call's arguments and end come behind its start, and
before the next call's start.
"""

from __future__ import annotations

from .events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart, merged


class Sink:
    """Owner: its OutputParser."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._ids: set[str] = set()
        self.num_calls = 0
        self.is_reasoning = False
        """Whether the output stands inside reasoning."""

    def take(self) -> list[Event]:
        """The events since the last time."""
        events, self._events = self._events, []
        return merged(events)

    def content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def start(self, name: str, id: str | None = None) -> None:
        """id: one that the model has given to an earlier call too counts as none"""
        self._events.append(ToolCallStart(self.num_calls, name, None if id in self._ids else id))
        self._ids |= {id} if id is not None else set()
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that started last."""
        if text:
            self._events.append(ToolCallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        self._events.append(ToolCallEnd(self.num_calls - 1))
