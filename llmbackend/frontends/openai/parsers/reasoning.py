"""Reads reasoning up to its end marker.

For: the output parser. Does not know: where reasoning may begin. Invariant: reasoning that is not closed goes on to the
end of the output.
"""

from __future__ import annotations

from .reader import NotACall, Reader, Reading, markers
from .sink import Sink
from .tables import ReasoningFormat


def read_reasoning(reader: Reader, sink: Sink, table: ReasoningFormat) -> Reading[str | None]:
    """Behind the start marker, or where the prompt has opened the reasoning.

    Returns the marker that ended it, which is held; None at the output's end.
    """
    sink.is_reasoning = True
    ends = (table.end, *table.ended_by)
    marker = yield from _read_start(reader, sink, (table.start, *ends))
    if marker not in ends:
        marker = yield from reader.until(markers(frozenset(ends)), sink.reasoning)
    sink.is_reasoning = not marker
    return marker or None


def _read_start(reader: Reader, sink: Sink, options: tuple[str, ...]) -> Reading[str | None]:
    """A marker as the first of the reasoning: some models repeat the start marker that the prompt has."""
    reader.hold()
    try:
        yield from reader.skip_space()
        marker = yield from reader.one_of(options)
    except NotACall:
        marker = None
    if marker is None:
        sink.reasoning(reader.release())
    return marker
