"""A text as a model writes it, and what a client must see of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

from llmbackend.frontends.generation.parsers import (
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from llmbackend.frontends.generation.parsers.events import merged

Token = tuple[str, bool]
"""(text, is_special)"""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """The exact text."""
    id: str | None = None
    is_complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """tools, reasoning: names of formats; special: the markers in `text` that are special tokens."""

    text: str
    tools: str = ""
    reasoning: str = ""
    special: tuple[str, ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasoning_is_open: bool = False
    finish_reason: str = "stop"
    content: str = ""
    reasons: str = ""
    """The text of its reasoning."""
    calls: tuple[Call, ...] = ()


@dataclass(slots=True)
class Seen:
    """What a client has at the end."""

    content: str = ""
    reasons: str = ""
    calls: list[Call] = field(default_factory=list)


def tokens(sample: Sample, text: str | None = None) -> list[Token]:
    """The text's tokens, cut only around special ones."""
    text = sample.text if text is None else text
    if not sample.special:
        return [(text, False)]
    pieces = re.split("(" + "|".join(map(re.escape, sorted(sample.special, key=len, reverse=True))) + ")", text)
    return [(piece, piece in sample.special) for piece in pieces if piece]


def cut(whole: Iterable[Token], random: Random, longest: int) -> Iterator[Token]:
    """The same text, cut at random into tokens of at most `longest` characters, some of them empty."""
    for text, is_special in whole:
        if is_special:
            yield text, True
            continue
        ends = [0]
        while ends[-1] < len(text):
            ends.append(min(len(text), ends[-1] + random.randint(0, longest)))
        yield from ((text[begin:end], False) for begin, end in pairwise(ends))


def parse(sample: Sample, parts: Iterable[Token]) -> list[Event]:
    """All events of one output, pieces of one kind put together."""
    parser = OutputParser(
        TOOL_CALL_FORMATS.get(sample.tools),
        REASONING_FORMATS.get(sample.reasoning),
        schemas=sample.schemas,
        reasoning_is_open=sample.reasoning_is_open,
    )
    events = [event for text, is_special in parts for event in parser.push(0, text, is_special)]
    return merged(events + parser.finish(sample.finish_reason))


def seen(events: Iterable[Event]) -> Seen:
    """What the events say, put together as a client does."""
    result = Seen()
    for event in events:
        match event:
            case ContentDelta(text):
                result.content += text
            case ReasoningDelta(text):
                result.reasons += text
            case ToolCallStart(index, name, id):
                assert index == len(result.calls)
                result.calls.append(Call(name, "", id, is_complete=False))
            case ToolCallArguments(index, text):
                call = result.calls[index]
                assert not call.is_complete
                result.calls[index] = Call(call.name, call.arguments + text, call.id, is_complete=False)
            case ToolCallEnd(index):
                call = result.calls[index]
                assert not call.is_complete
                result.calls[index] = Call(call.name, call.arguments, call.id)
    return result
