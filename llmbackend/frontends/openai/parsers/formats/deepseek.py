"""DeepSeek V3 and R1 (arguments in a code block) and V3.1 (as they are), the name before them."""

from __future__ import annotations

import re

from ..tables import CallGrammar, HeadedCall, MarkedCalls, ToolCallFormat

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_NAME = r"\s*(?P<name>[^\s`<]{1,256})\s*"

DEEPSEEK_V3 = ToolCallFormat(
    name="deepseek_v3",
    body=MarkedCalls(
        begin=(BEGIN,),
        calls=(
            HeadedCall(
                begin=CALL_BEGIN,
                header_end=("{",),
                header=re.compile(r"\s*\w*\s*" + re.escape(SEPARATOR) + _NAME + r"(?:```(?:json)?\s*)?"),
            ),
        ),
        call_end=("```", CALL_END),
        end=(END,),
    ),
    grammar=CallGrammar(
        begin=BEGIN,
        call_begin=CALL_BEGIN + "function" + SEPARATOR,
        name_end="\n```json\n",
        call_end="\n```" + CALL_END,
        separator="\n",
        end=END,
    ),
    trigger=BEGIN,
)
DEEPSEEK_V31 = ToolCallFormat(
    name="deepseek_v31",
    body=MarkedCalls(
        begin=(BEGIN,),
        calls=(HeadedCall(begin=CALL_BEGIN, header_end=(SEPARATOR,), header=re.compile(_NAME)),),
        call_end=(CALL_END,),
        end=(END,),
    ),
    grammar=CallGrammar(begin=BEGIN, call_begin=CALL_BEGIN, name_end=SEPARATOR, call_end=CALL_END, end=END),
    trigger=BEGIN,
)
