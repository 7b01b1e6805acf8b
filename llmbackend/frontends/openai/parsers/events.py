"""What an output parser tells of a model's output: content, reasoning and tool calls, piece by piece.

For: writers of responses. Does not know: how models write these. Invariant: events are frozen; pieces of one kind that
follow each other, put together, do not depend on how the output was cut into tokens' texts.
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
