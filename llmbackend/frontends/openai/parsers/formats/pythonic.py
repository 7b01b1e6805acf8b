"""Calls as Python writes them, in a list: Llama 3.2 and 4, Gemma 3, ToolACE; LFM2 and Llama 4 put markers around it."""

from __future__ import annotations

from ..tables import LiteralCall, MarkedCalls, ToolCallFormat

PYTHONIC = ToolCallFormat(
    name="pythonic", body=MarkedCalls(bare_begin=("[",), calls=(LiteralCall(only_known_names=True),), list_begin="[")
)
LLAMA4_PYTHONIC = ToolCallFormat(
    name="llama4_pythonic",
    body=MarkedCalls(
        begin=("<|python_start|>",),
        bare_begin=("[",),
        calls=(LiteralCall(only_known_names=True),),
        list_begin="[",
        end=("<|python_end|>",),
    ),
    trigger="<|python_start|>",
)
LFM2 = ToolCallFormat(
    name="lfm2",
    body=MarkedCalls(
        begin=("<|tool_call_start|>",),
        calls=(LiteralCall(),),
        list_begin="[",
        end=("<|tool_call_end|>",),
    ),
    trigger="<|tool_call_start|>",
)
