"""GLM 4.5 and 4.6 (the parts of a call on lines of their own) and 4.7 and later (without newlines). Also Laguna."""

from __future__ import annotations

from dataclasses import replace

from ..tables import CallGrammar, MarkedCalls, TaggedCall, ToolCallFormat

BEGIN, END = "<tool_call>", "</tool_call>"
_BODY = MarkedCalls(
    begin=(BEGIN,),
    calls=(
        TaggedCall(
            key_begin="<arg_key>",
            key_end="</arg_key>",
            value_begin="<arg_value>",
            value_end="</arg_value>",
        ),
    ),
    end=(END,),
)
"""Both forms are read by one table: white space between the parts says nothing."""

GLM45 = ToolCallFormat(
    name="glm45",
    body=_BODY,
    grammar=CallGrammar(
        call_begin=BEGIN,
        name_end="\n",
        key_begin="<arg_key>",
        key_end="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
        text_excludes=("</arg_value>",),
        call_end=END,
        separator="\n",
    ),
    trigger=BEGIN,
)
GLM47 = ToolCallFormat(
    name="glm47",
    body=_BODY,
    grammar=CallGrammar(
        call_begin=BEGIN,
        name_end="",
        key_begin="<arg_key>",
        key_end="</arg_key><arg_value>",
        value_end="</arg_value>",
        text_excludes=("</arg_value>",),
        call_end=END,
    ),
    trigger=BEGIN,
)
POOLSIDE_V1 = replace(GLM47, name="poolside_v1")
