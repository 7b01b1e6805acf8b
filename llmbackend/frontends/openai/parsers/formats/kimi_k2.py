"""Kimi K2: the call's id, which holds the function's name, before the arguments: `functions.f:0`."""

from __future__ import annotations

import re

from ..tables import CallGrammar, HeadedCall, MarkedCalls, ToolCallFormat

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, ARGUMENTS_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

KIMI_K2 = ToolCallFormat(
    name="kimi_k2",
    body=MarkedCalls(
        begin=(BEGIN,),
        calls=(
            HeadedCall(
                begin=CALL_BEGIN,
                header_end=(ARGUMENTS_BEGIN,),
                header=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256})(?::\d+)?)\s*"),
            ),
        ),
        call_end=(CALL_END,),
        end=(END,),
    ),
    grammar=CallGrammar(
        begin=BEGIN,
        call_begin=CALL_BEGIN + "functions.",
        name_end=":0" + ARGUMENTS_BEGIN,
        call_end=CALL_END,
        end=END,
    ),
    trigger=BEGIN,
)
