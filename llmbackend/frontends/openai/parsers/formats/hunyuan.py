"""Hunyuan A13B (a list of JSON objects) and Hy3 (tagged parameters, whose tags end with the name of the release)."""

from __future__ import annotations

from ..tables import CallGrammar, MarkedCalls, TaggedCall, ToolCallFormat
from .json_lists import JAMBA, NAME_END

HUNYUAN_A13B = ToolCallFormat(
    name="hunyuan_a13b",
    body=JAMBA.body,
    grammar=CallGrammar(
        begin="<tool_calls>[",
        call_begin='{"name": "',
        name_end=NAME_END,
        call_end="}",
        separator=", ",
        end="]</tool_calls>",
    ),
    trigger="<tool_calls>",
)
HY_V3 = ToolCallFormat(
    name="hy_v3",
    body=MarkedCalls(
        begin=("<tool_calls:opensource>",),
        calls=(
            TaggedCall(
                begin="<tool_call:opensource>",
                header_end=("<tool_sep:opensource>",),
                key_begin="<arg_key:opensource>",
                key_end="</arg_key:opensource>",
                value_begin="<arg_value:opensource>",
                value_end="</arg_value:opensource>",
                end=("</tool_call:opensource>",),
            ),
        ),
        end=("</tool_calls:opensource>",),
    ),
    grammar=CallGrammar(
        begin="<tool_calls:opensource>\n",
        call_begin="<tool_call:opensource>",
        name_end="<tool_sep:opensource>\n",
        key_begin="<arg_key:opensource>",
        key_end="</arg_key:opensource>\n<arg_value:opensource>",
        value_end="</arg_value:opensource>\n",
        text_excludes=("</arg_value:opensource>",),
        call_end="</tool_call:opensource>\n",
        end="</tool_calls:opensource>",
    ),
    trigger="<tool_calls:opensource>",
)
