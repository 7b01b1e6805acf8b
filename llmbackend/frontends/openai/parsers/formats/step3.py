"""Step 3: tagged parameters behind DeepSeek's kind of header. Source: SGLang's description of the format."""

from __future__ import annotations

import re

from ..tables import CallGrammar, MarkedCalls, TaggedCall, ToolCallFormat

BEGIN, END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL_BEGIN, CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"

STEP3 = ToolCallFormat(
    name="step3",
    body=MarkedCalls(
        begin=(BEGIN,),
        calls=(
            TaggedCall(
                begin=CALL_BEGIN,
                header_end=('">',),
                header=re.compile(r'\s*function\s*<｜tool_sep｜>\s*<steptml:invoke name="(?P<name>[^\s"<>]{1,256})'),
                key_begin='<steptml:parameter name="',
                key_end='">',
                value_end="</steptml:parameter>",
                end=("</steptml:invoke>",),
            ),
        ),
        call_end=(CALL_END,),
        end=(END,),
    ),
    grammar=CallGrammar(
        begin=f"{BEGIN}\n",
        call_begin=f'{CALL_BEGIN}function<｜tool_sep｜><steptml:invoke name="',
        name_end='">\n',
        key_begin='<steptml:parameter name="',
        key_end='">',
        value_end="</steptml:parameter>\n",
        text_excludes=("</steptml:parameter>",),
        call_end=f"</steptml:invoke>{CALL_END}\n",
        end=END,
    ),
    trigger=BEGIN,
)
