"""The formats of tool calls and of reasoning, by vLLM's names of their parsers: one table each.

For: whoever chooses a parser by name. Does not know: how tables are read. Invariant: a registered name is the name of
its table.
"""

from __future__ import annotations

from ..tables import ReasoningFormat, ToolCallFormat
from .hermes import HERMES
from .think_tags import DEEPSEEK_R1, QWEN3

TOOL_CALL_FORMATS: dict[str, ToolCallFormat] = {table.name: table for table in (HERMES,)}
REASONING_FORMATS: dict[str, ReasoningFormat] = {table.name: table for table in (DEEPSEEK_R1, QWEN3)}
