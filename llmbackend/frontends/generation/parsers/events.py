"""Events of an output parser: pieces of content, reasoning and tool calls.

Invariants: the joined pieces do not depend on how the output was split into tokens; a call's arguments and end come
after its start and before the next call's start.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    index: int
    """Position of the call in the output, from 0."""
    name: str
    id: str | None = None
    """Set only if the model wrote one. If it repeats an earlier one, it gets a free number."""


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is complete. A call that was cut off, for example at `length`, has no end."""

    index: int


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd


def merged(events: list[Event]) -> list[Event]:
    """Joins consecutive pieces of the same kind."""
    if len(events) < 2:
        return events
    result: list[Event] = []
    for _, alike in itertools.groupby(events, type):
        first, *others = run = list(alike)
        if not others or isinstance(first, ToolCallStart | ToolCallEnd):
            result += run
        else:
            pieces = (event.text for event in run if not isinstance(event, ToolCallStart | ToolCallEnd))
            result.append(replace(first, text="".join(pieces)))
    return result


_NUMBERED = re.compile(r"(?P<prefix>.*:)(?P<number>\d{1,9})", re.DOTALL)


class Sink:
    """Collects events. Owned by an OutputParser."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """names: the request's functions"""
        self.names = names
        self._events: list[Event] = []
        self._ids: set[str] = set()
        self._next_numbers: dict[str, int] = {}
        """By prefix of the ids: above all that were given to repeated ones."""
        self.num_calls = 0
        self.is_reasoning = False
        """Whether the output is inside reasoning."""
        self.may_reason = False
        """Whether the output is in text that may become the marker or the header of reasoning, or in reasoning that
        may become a call."""

    def take(self) -> list[Event]:
        """The events since the last call."""
        events, self._events = self._events, []
        return merged(events)

    def content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._events.append(ReasoningDelta(text))

    def start(self, name: str, id: str | None = None) -> None:
        """id: if an earlier call has the same one, it gets a free number, or is dropped if it has no number"""
        while id is not None and id in self._ids:
            if (numbered := _NUMBERED.fullmatch(id)) is None:
                id = None
            else:
                prefix = numbered["prefix"]
                number = max(int(numbered["number"]) + 1, self._next_numbers.get(prefix, 0))
                self._next_numbers[prefix], id = number + 1, f"{prefix}{number}"
        self._events.append(ToolCallStart(self.num_calls, name, id))
        self._ids |= {id} if id is not None else set()
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the latest call."""
        if text:
            self._events.append(ToolCallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        self._events.append(ToolCallEnd(self.num_calls - 1))
