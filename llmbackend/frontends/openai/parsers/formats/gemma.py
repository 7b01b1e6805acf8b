"""FunctionGemma and Gemma 4: `call:f{k:1,l:<escape>text<escape>}` between special tokens."""

from __future__ import annotations

from ..tables import LiteralCall, MarkedCalls, ReasoningFormat, ToolCallFormat


def _call(quote: str) -> LiteralCall:
    return LiteralCall(begin="call:", open="{", close="}", assign=":", quotes=(quote,), has_bare_keys=True)


FUNCTIONGEMMA = ToolCallFormat(
    name="functiongemma",
    body=MarkedCalls(begin=("<start_function_call>",), calls=(_call("<escape>"),), end=("<end_function_call>",)),
    trigger="<start_function_call>",
)
GEMMA4 = ToolCallFormat(
    name="gemma4",
    body=MarkedCalls(begin=("<|tool_call>",), calls=(_call('<|"|>'),), end=("<tool_call|>",)),
    trigger="<|tool_call>",
)
GEMMA4_REASONING = ReasoningFormat(name="gemma4", start="<|channel>thought\n", end="<channel|>")
