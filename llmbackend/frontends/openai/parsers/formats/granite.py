"""Granite 3 (a list of JSON objects behind a marker), Granite 4 (as Hermes) and Granite 20B of function calling."""

from __future__ import annotations

from dataclasses import replace

from ..tables import CallGrammar, JsonCall, MarkedCalls, ReasoningFormat, ToolCallFormat
from .hermes import HERMES

GRANITE = ToolCallFormat(
    name="granite",
    body=MarkedCalls(
        begin=("<|tool_call|>", "<tool_call>"),
        bare_begin=("[",),
        calls=(JsonCall(only_known_names=True),),
        list_begin="[",
        end=("</tool_call>",),
    ),
    grammar=CallGrammar(
        begin="<|tool_call|>[",
        call_begin='{"name": "',
        name_end='", "arguments": ',
        call_end="}",
        separator=", ",
        end="]",
    ),
    trigger="<|tool_call|>",
)
GRANITE4 = replace(HERMES, name="granite4")
GRANITE_20B_FC = ToolCallFormat(
    name="granite-20b-fc",
    body=MarkedCalls(begin=("<function_call>",), calls=(JsonCall(),)),
    grammar=CallGrammar(
        call_begin='<function_call> {"name": "',
        name_end='", "arguments": ',
        call_end="}",
        separator="\n",
    ),
    trigger="<function_call>",
)
GRANITE_REASONING = ReasoningFormat(name="granite", start="Here is my thought process:", end="Here is my response:")
