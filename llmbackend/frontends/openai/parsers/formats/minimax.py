"""MiniMax M1 (JSON objects, one a line, in one pair of tags) and M2 (tagged parameters)."""

from __future__ import annotations

import re

from ..tables import CallGrammar, JsonCall, MarkedCalls, TaggedCall, ToolCallFormat

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
MINIMAX_M2 = ToolCallFormat(
    name="minimax_m2",
    body=MarkedCalls(
        begin=("<minimax:tool_call>",),
        calls=(
            TaggedCall(
                begin="<invoke name=",
                header_end=(">",),
                header=re.compile(r"""\s*(?P<quote>["']?)(?P<name>[^\s"'<>]{1,256})(?P=quote)\s*"""),
                key_begin='<parameter name="',
                key_end='">',
                value_end="</parameter>",
                end=("</invoke>",),
            ),
        ),
        end=("</minimax:tool_call>",),
    ),
    grammar=CallGrammar(
        begin="<minimax:tool_call>\n",
        call_begin='<invoke name="',
        name_end='">\n',
        key_begin='<parameter name="',
        key_end='">',
        value_end="</parameter>\n",
        text_excludes=("</parameter>",),
        call_end="</invoke>\n",
        end="</minimax:tool_call>",
    ),
    trigger="<minimax:tool_call>",
)
