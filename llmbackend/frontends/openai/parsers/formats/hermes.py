"""Hermes: one JSON object per call, in `<tool_call>` tags. Also Qwen2.5, Qwen3, Granite 4 and ERNIE 4.5."""

from __future__ import annotations

from dataclasses import replace

from ..tables import CallGrammar, JsonCall, MarkedCalls, ToolCallFormat

HERMES = ToolCallFormat(
    name="hermes",
    body=MarkedCalls(begin=("<tool_call>",), calls=(JsonCall(),), list_begin="[", end=("</tool_call>",)),
    grammar=CallGrammar(
        call_begin='<tool_call>\n{"name": "',
        name_end='", "arguments": ',
        call_end="}\n</tool_call>",
        separator="\n",
    ),
    trigger="<tool_call>",
)
ERNIE45 = replace(HERMES, name="ernie45")
