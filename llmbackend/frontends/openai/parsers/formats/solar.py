"""Solar Open 2: special tokens around names and values. Source: vLLM's description of the format."""

from __future__ import annotations

from ..tables import CallGrammar, MarkedCalls, ReasoningFormat, TaggedCall, ToolCallFormat

BEGIN, END = "<|tool_call:start|>", "<|tool_call:end|>"
KEY_BEGIN, KEY_END, VALUE_END = "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"

SOLAR_OPEN2 = ToolCallFormat(
    name="solar_open2",
    body=MarkedCalls(
        begin=(BEGIN,),
        calls=(TaggedCall(key_begin=KEY_BEGIN, key_end=KEY_END, value_end=VALUE_END, may_omit_value_end=True),),
        end=(END,),
    ),
    grammar=CallGrammar(
        call_begin=BEGIN,
        name_end="\n",
        key_begin=KEY_BEGIN,
        key_end=KEY_END,
        value_end=f"{VALUE_END}\n",
        text_excludes=(VALUE_END, KEY_BEGIN),
        call_end=END,
        separator="\n",
    ),
    trigger=BEGIN,
)
SOLAR_OPEN2_REASONING = ReasoningFormat(
    name="solar_open2", start="<|think:start|>", end="<|think:end|>", ended_by=(BEGIN,)
)
