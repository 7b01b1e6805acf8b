"""What a backend may tell a trace of its own work: spans below the model's span, and attributes of that.

For: backends of traced requests. Does not know: where traces go. Invariant: values are numbers and names, never what a
client said or what a model answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span. ns: monotonic."""

    name: str
    ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A part of what a model did for its request. Times are monotonic ns."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    is_error: bool = False
