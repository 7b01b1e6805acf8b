"""Formats whose calls have literals as arguments: Python's or Gemma's own.

Sources: the models' chat templates; for OLMo 3, vLLM's example template.
"""

from __future__ import annotations

from ..tables import CallGrammar, LiteralCall, MarkedCalls, ToolCallFormat


def _python(
    name: str, begin: str = "", end: str = "", *, is_bare: bool = False, is_list: bool = True
) -> ToolCallFormat:
    """begin, end: markers around the calls
    is_bare: calls are also parsed without markers
    is_list: False: one call per line, without brackets
    """
    opening, closing, separator = ("[", "]", ", ") if is_list else ("\n", "\n", "\n")
    return ToolCallFormat(
        name=name,
        body=MarkedCalls(
            begin=(begin,) if begin else (),
            bare_begin=("[",) if is_bare else (),
            calls=(LiteralCall(only_known_names=is_bare),),
            list_begin="[" if is_list else "",
            end=(end,) if end else (),
        ),
        grammar=CallGrammar.of(
            "…(…)",
            "…=…, ",  # Python allows a comma after the last argument, too
            begin=begin + opening,
            separator=separator,
            end=closing + end,
            text_quote=None,
        ),
    )


def _gemma(name: str, begin: str, end: str, quote: str) -> ToolCallFormat:
    # Lists and objects that a grammar enforces are JSON, with JSON's quotes.
    call = LiteralCall(begin="call:", open="{", close="}", assign=":", quotes=(quote, '"'))
    return ToolCallFormat(
        name=name,
        body=MarkedCalls(begin=(begin,), calls=(call,), end=(end,)),
        grammar=CallGrammar.of(f"{begin}call:…{{…}}{end}", "…:…,", text_quote=quote, text_excludes=(quote,)),
    )


LITERAL_FORMATS = (
    _python("pythonic", is_bare=True),  # Llama 3.2, Gemma 3, ToolACE
    _python("llama4_pythonic", "<|python_start|>", "<|python_end|>", is_bare=True),
    _python("lfm2", "<|tool_call_start|>", "<|tool_call_end|>"),
    _python("olmo3", "<function_calls>", "</function_calls>", is_list=False),
    _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
)
