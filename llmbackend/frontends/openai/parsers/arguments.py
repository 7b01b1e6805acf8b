"""What all syntaxes of calls share: a call's arguments as JSON, and its header with the name.

For: the readers of the syntaxes. Does not know: sections, content. Invariant: a call starts when its name is known and
its arguments begin; what was read before that is held back, so that it can still become content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from .json_values import read_value
from .reader import NotACall, Reader, Reading
from .sink import Sink

MAX_HEADER_CHARS = 512


def start(reader: Reader, sink: Sink, name: str, id: str | None = None) -> None:
    """The call is one: what was held back of it was no content."""
    reader.drop()
    sink.start(name, id)


def end(reader: Reader, sink: Sink) -> None:
    """The call is complete: what follows is layout until it turns out to be content."""
    sink.end()
    reader.hold()


def cut_off(reader: Reader) -> None:
    """The call began, and will never be complete."""
    reader.hold()


def read_arguments(reader: Reader, sink: Sink, name: str, id: str | None) -> Reading[None]:
    """Starts the call and passes its arguments on: an object as it stands, or as the value of a JSON string."""
    yield from reader.skip_space()
    symbol = yield from reader.peek()
    if symbol == "{" or not symbol:
        start(reader, sink, name, id)
        if (yield from read_value(reader, sink.arguments)):
            end(reader, sink)
        else:
            cut_off(reader)
        return
    pieces: list[str] = []
    if not (yield from read_value(reader, pieces.append)):
        raise NotACall
    whole_arguments(reader, sink, name, id, held_arguments("".join(pieces)))


def held_arguments(value: str) -> str:
    """The JSON object in a whole value: itself, the one that a string holds, or an empty one for null."""
    if value == "null":
        return "{}"
    try:
        text = json.loads(value, strict=False) if value.startswith('"') else value
    except ValueError:
        raise NotACall from None
    if not text.lstrip().startswith("{"):
        raise NotACall
    return str(text)


def whole_arguments(reader: Reader, sink: Sink, name: str, id: str | None, text: str) -> None:
    """A call whose arguments are already known."""
    start(reader, sink, name, id)
    sink.arguments(text)
    end(reader, sink)


Header = tuple[str, str | None, str]
"""A call's name, its id if the model writes one, and what ended the header."""


def read_header(reader: Reader, ends: Collection[str], pattern: re.Pattern[str]) -> Reading[Header]:
    """What stands before the arguments, up to the first of `ends`, which is read unless it is the arguments' bracket.

    Raises NotACall where there is no name.
    """
    text, found = "", None
    while found is None:
        symbol = yield from reader.peek()
        if not symbol or len(text) > MAX_HEADER_CHARS:
            raise NotACall
        if symbol == "{" and symbol in ends:
            break
        else:
            text += reader.take()
            found = next((end for end in ends if text.endswith(end)), None)
    match = pattern.fullmatch(text.removesuffix(found or ""))
    if match is None:
        raise NotACall
    return match["name"], match.groupdict().get("id"), found or ""
