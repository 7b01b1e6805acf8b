"""Parsers of model output: one streaming parser, and tables of tool-call and reasoning formats."""

from .detection import detect
from .events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from .formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from .output_parser import OutputParser
from .schema_types import is_plain_text
from .tables import CallGrammar, MarkedCalls, Messages, ReasoningFormat, ToolCallFormat

__all__ = [
    "REASONING_FORMATS",
    "TOOL_CALL_FORMATS",
    "CallGrammar",
    "ContentDelta",
    "Event",
    "MarkedCalls",
    "Messages",
    "OutputParser",
    "ReasoningDelta",
    "ReasoningFormat",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallFormat",
    "ToolCallStart",
    "detect",
    "is_plain_text",
]
