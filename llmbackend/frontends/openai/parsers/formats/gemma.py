"""FunctionGemma and Gemma 4: `call:f{k:1,l:<escape>text<escape>}` between special tokens."""

from __future__ import annotations

from ..tables import CallGrammar, LiteralCall, MarkedCalls, ReasoningFormat, ToolCallFormat


def _format(name: str, begin: str, end: str, quote: str) -> ToolCallFormat:
    # Lists and objects that a grammar enforces are JSON, with JSON's quotes.
    call = LiteralCall(begin="call:", open="{", close="}", assign=":", quotes=(quote, '"'), has_bare_keys=True)
    return ToolCallFormat(
        name=name,
        body=MarkedCalls(begin=(begin,), calls=(call,), end=(end,)),
        grammar=CallGrammar(
            call_begin=f"{begin}call:",
            name_end="{",
            key_end=":",
            value_end=",",
            text_quote=quote,
            text_excludes=(quote,),
            call_end="}" + end,
        ),
        trigger=begin,
    )


FUNCTIONGEMMA = _format("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
GEMMA4_REASONING = ReasoningFormat(name="gemma4", start="<|channel>thought\n", end="<channel|>")
