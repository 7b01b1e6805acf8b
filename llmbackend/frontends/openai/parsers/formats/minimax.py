"""MiniMax M1 (JSON objects, one a line, in one pair of tags), M2 (tagged parameters) and M3 (nested tags).

Dots writes M2's tags in a section of another name (source: SGLang's description). Of M3, a grammar enforces lists and
objects as JSON in their parameter's tag, which is read, too. Source of the others: the models' chat templates.
"""

from __future__ import annotations

import re

from ..tables import CallGrammar, JsonCall, MarkedCalls, NestedCall, ReasoningFormat, TaggedCall, ToolCallFormat

_HEADER = re.compile(r"""\s*(?P<quote>["']?)(?P<name>[^\s"'<>]{1,256})(?P=quote)\s*""")

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


def _invocations(name: str, section: str) -> ToolCallFormat:
    begin, end = f"<{section}>", f"</{section}>"
    return ToolCallFormat(
        name=name,
        body=MarkedCalls(
            begin=(begin,),
            calls=(
                TaggedCall(
                    begin="<invoke name=",
                    header_end=(">",),
                    header=_HEADER,
                    key_begin='<parameter name="',
                    key_end='">',
                    value_end="</parameter>",
                    end=("</invoke>",),
                ),
            ),
            end=(end,),
        ),
        grammar=CallGrammar(
            begin=f"{begin}\n",
            call_begin='<invoke name="',
            name_end='">\n',
            key_begin='<parameter name="',
            key_end='">',
            value_end="</parameter>\n",
            text_excludes=("</parameter>",),
            call_end="</invoke>\n",
            end=end,
        ),
        trigger=begin,
    )


MINIMAX_M2 = _invocations("minimax_m2", "minimax:tool_call")
DOTS = _invocations("dots", "dots_function_call")
_MARK = "]<]minimax[>["
MINIMAX_M3 = ToolCallFormat(
    name="minimax_m3",
    body=MarkedCalls(
        begin=(f"{_MARK}<tool_call>",),
        calls=(NestedCall(begin=f"{_MARK}<invoke name=", header_end=(">",), header=_HEADER, mark=_MARK),),
        end=(f"{_MARK}</tool_call>",),
    ),
    grammar=CallGrammar(
        begin=f"{_MARK}<tool_call>\n",
        call_begin=f'{_MARK}<invoke name="',
        name_end='">',
        key_begin=f"{_MARK}<",
        key_end=">",
        value_end=f"{_MARK}</",
        name_closes=">",
        text_excludes=(_MARK,),
        call_end=f"{_MARK}</invoke>\n",
        end=f"{_MARK}</tool_call>",
    ),
    trigger=f"{_MARK}<tool_call>",
)
MINIMAX_M3_REASONING = ReasoningFormat(name="minimax_m3", start="<mm:think>", end="</mm:think>")
