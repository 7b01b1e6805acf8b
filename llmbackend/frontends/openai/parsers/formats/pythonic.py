"""Calls as Python writes them, in a list: Llama 3.2 and 4, Gemma 3, ToolACE; LFM2 and Llama 4 put markers around it.

OLMo 3 writes one call a line, between tags; its source is vLLM's example of a chat template for it.
"""

from __future__ import annotations

from dataclasses import replace

from ..tables import CallGrammar, LiteralCall, MarkedCalls, ToolCallFormat

_GRAMMAR = CallGrammar(
    begin="[",
    call_begin="",
    name_end="(",
    key_end="=",
    value_end=", ",  # Python allows it behind the last argument, too
    text_quote=None,
    call_end=")",
    separator=", ",
    end="]",
)
_KNOWN_CALL = LiteralCall(only_known_names=True)

PYTHONIC = ToolCallFormat(
    name="pythonic",
    body=MarkedCalls(bare_begin=("[",), calls=(_KNOWN_CALL,), list_begin="["),
    grammar=_GRAMMAR,
)
LLAMA4_PYTHONIC = ToolCallFormat(
    name="llama4_pythonic",
    body=MarkedCalls(
        begin=("<|python_start|>",),
        bare_begin=("[",),
        calls=(_KNOWN_CALL,),
        list_begin="[",
        end=("<|python_end|>",),
    ),
    grammar=replace(_GRAMMAR, begin="<|python_start|>[", end="]<|python_end|>"),
    trigger="<|python_start|>",
)
LFM2 = ToolCallFormat(
    name="lfm2",
    body=MarkedCalls(
        begin=("<|tool_call_start|>",), calls=(LiteralCall(),), list_begin="[", end=("<|tool_call_end|>",)
    ),
    grammar=replace(_GRAMMAR, begin="<|tool_call_start|>[", end="]<|tool_call_end|>"),
    trigger="<|tool_call_start|>",
)
OLMO3 = ToolCallFormat(
    name="olmo3",
    body=MarkedCalls(begin=("<function_calls>",), calls=(LiteralCall(),), end=("</function_calls>",)),
    grammar=replace(_GRAMMAR, begin="<function_calls>\n", separator="\n", end="\n</function_calls>"),
    trigger="<function_calls>",
)
