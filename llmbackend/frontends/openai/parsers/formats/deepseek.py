"""DeepSeek V3 and R1 (arguments in a code block) and V3.1 (as they are), the name before them; V3.2 and V4 (tagged).

GigaChat 3.5 writes V4's tags under another name.
Sources: the models' chat templates; of V3.2 and V4, which have none, llama.cpp's and the encoders beside the weights.
"""

from __future__ import annotations

import re

from ..tables import CallGrammar, HeadedCall, MarkedCalls, TaggedCall, ToolCallFormat

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


def _dsml(name: str, section: str, tag: str = "｜DSML｜") -> ToolCallFormat:
    begin, end = f"<{tag}{section}>", f"</{tag}{section}>"
    return ToolCallFormat(
        name=name,
        body=MarkedCalls(
            begin=(begin,),
            calls=(
                TaggedCall(
                    begin=f"<{tag}invoke",
                    header_end=(">",),
                    header=re.compile(r'\s+name="(?P<name>[^\s"<>]{1,256})"\s*'),
                    key_begin=f"<{tag}parameter",
                    key_end=">",
                    key=re.compile(r'\s+name="(?P<name>[^"<>\n]+)"(?:\s+string="(?:(?P<text>true)|false)")?\s*'),
                    value_end=f"</{tag}parameter>",
                    end=(f"</{tag}invoke>",),
                ),
            ),
            end=(end,),
        ),
        grammar=CallGrammar(
            begin=f"{begin}\n",
            call_begin=f'<{tag}invoke name="',
            name_end='">\n',
            key_begin=f'<{tag}parameter name="',
            key_end='" string="true">',
            json_key_end='" string="false">',
            value_end=f"</{tag}parameter>\n",
            text_excludes=(f"</{tag}parameter>",),
            call_end=f"</{tag}invoke>\n",
            end=end,
        ),
        trigger=begin,
    )


DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")
GIGACHAT35 = _dsml("gigachat35", "tool_calls", "｜GCML｜")
