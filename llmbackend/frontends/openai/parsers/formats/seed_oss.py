"""Seed OSS: tagged parameters as Qwen3-Coder's, without newlines around the values; its own reasoning tags."""

from __future__ import annotations

from ..tables import CallGrammar, MarkedCalls, ReasoningFormat, TaggedCall, ToolCallFormat

BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"
SEED_OSS = ToolCallFormat(
    name="seed_oss",
    body=MarkedCalls(
        begin=(BEGIN,),
        calls=(
            TaggedCall(
                begin="<function=",
                header_end=(">",),
                key_begin="<parameter=",
                key_end=">",
                value_end="</parameter>",
                end=("</function>",),
            ),
        ),
        end=(END,),
    ),
    grammar=CallGrammar(
        call_begin=BEGIN + "\n<function=",
        name_end=">\n",
        key_begin="<parameter=",
        key_end=">",
        value_end="</parameter>\n",
        text_excludes=("</parameter>",),
        call_end="</function>\n" + END,
        separator="\n",
    ),
    trigger=BEGIN,
)
SEED_OSS_REASONING = ReasoningFormat(name="seed_oss", start="<seed:think>", end="</seed:think>")
