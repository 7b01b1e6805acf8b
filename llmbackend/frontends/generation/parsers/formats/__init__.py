"""Tool-call and reasoning formats, by vLLM's parser names."""

from __future__ import annotations

from ..tables import ReasoningFormat, ToolCallFormat
from .json_objects import JSON_FORMATS
from .literals import LITERAL_FORMATS
from .reasoning import OPENAI, REASONING
from .tags import TAGGED_FORMATS

TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {
    format.name: format for format in (*JSON_FORMATS, *TAGGED_FORMATS, *LITERAL_FORMATS, OPENAI)
}
REASONING_FORMATS: dict[str, ReasoningFormat] = {format.name: format for format in REASONING}
