"""MiniMax M1: JSON objects, one a line, in one pair of tags."""

from __future__ import annotations

from ..tables import CallGrammar, JsonCall, MarkedCalls, ToolCallFormat

MINIMAX = ToolCallFormat(
    name="minimax",
    body=MarkedCalls(begin=("<tool_calls>",), calls=(JsonCall(),), end=("</tool_calls>",)),
    grammar=CallGrammar(
        begin="<tool_calls>\n",
        call_begin='{"name": "',
        name_end='", "arguments": ',
        call_end="}\n",
        end="</tool_calls>",
    ),
    trigger="<tool_calls>",
)
