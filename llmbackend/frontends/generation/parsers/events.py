"""What an output parser finds in a model's output: content, reasoning and tool calls, piece by piece.

For: the parser's parts, which put events into a Sink, and writers of responses. Does not know: how models write these.
Invariants: events are frozen; successive pieces of one kind, joined, do not depend on how the output was cut into
tokens; a call's arguments and end come after its start and before the next call's start.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    """Which call of the output, from 0."""
    name: str
    id: str | None = None
    """Only where the model wrote one itself."""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of this call are complete. A call that was cut off, such as at `length`, has none."""

    index: int


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


def merged(events: list[Event]) -> list[Event]:
    """Pieces of one kind that follow each other become one."""
    if len(events) < 2:
        return events
    result: list[Event] = []
    pieces: list[str] = []
    first: ContentDelta | ReasoningDelta | ToolCallArguments | None = None
    for event in events:
        if isinstance(event, ToolCallStart | ToolCallEnd):
            _append(result, first, pieces)
            first, pieces = None, []
            result.append(event)
            continue
        if type(event) is not type(first):
            _append(result, first, pieces)
            first, pieces = event, []
        pieces.append(event.text)
    _append(result, first, pieces)
    return result


def _append(
    result: list[Event], first: ContentDelta | ReasoningDelta | ToolCallArguments | None, pieces: list[str]
) -> None:
    if isinstance(first, ToolCallArguments):
        result.append(ToolCallArguments(first.index, "".join(pieces)))
    elif first is not None:
        result.append(type(first)("".join(pieces)))


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
