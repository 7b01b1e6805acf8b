"""Qwen3-Coder: a function tag with tagged parameters in `<tool_call>` tags, which the model sometimes leaves out.

Also Step 3.5 and MiMo V2, under vLLM's names of their parsers.
"""

from __future__ import annotations

from dataclasses import replace

from ..tables import CallGrammar, MarkedCalls, TaggedCall, ToolCallFormat

_CALL = TaggedCall(
    begin="<function=",
    header_end=(">",),
    key_begin="<parameter=",
    key_end=">",
    value_end="</parameter>",
    may_omit_value_end=True,
    end=("</function>",),
    trims_newline=True,
)
_BODY = MarkedCalls(begin=("<tool_call>", "<function="), calls=(_CALL,), end=("</tool_call>",))
_GRAMMAR = CallGrammar(
    call_begin="<tool_call>\n<function=",
    name_end=">\n",
    key_begin="<parameter=",
    key_end=">\n",
    value_end="\n</parameter>\n",
    text_excludes=("</parameter>", "<parameter=", "</function>"),
    call_end="</function>\n</tool_call>",
    separator="\n",
)

QWEN3_CODER = ToolCallFormat(name="qwen3_coder", body=_BODY, grammar=_GRAMMAR, trigger="<tool_call>\n<function=")
QWEN3_XML = replace(QWEN3_CODER, name="qwen3_xml")
MIMO = replace(QWEN3_CODER, name="mimo")
STEP3P5 = replace(QWEN3_CODER, name="step3p5")
