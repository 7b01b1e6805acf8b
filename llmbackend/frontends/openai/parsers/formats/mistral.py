"""Mistral: a list of JSON objects behind `[TOOL_CALLS]`, or, since version 11, name and arguments of one call."""

from __future__ import annotations

import re

from ..tables import CallGrammar, HeadedCall, JsonCall, MarkedCalls, ReasoningFormat, ToolCallFormat

_HEADER = re.compile(
    r"\s*(?P<name>[^\s\"'`<>(){}\[\]|]{1,256})\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]]{1,256})\s*)?"  # both special tokens
)

MISTRAL = ToolCallFormat(
    name="mistral",
    body=MarkedCalls(
        begin=("[TOOL_CALLS]",),
        calls=(JsonCall(), HeadedCall(header=_HEADER, header_end=("[ARGS]", "{"))),
        list_begin="[",
    ),
    grammar=CallGrammar(call_begin="[TOOL_CALLS]", name_end="[ARGS]", call_end=""),
    trigger="[TOOL_CALLS]",
)
MISTRAL_REASONING = ReasoningFormat(name="mistral", start="[THINK]", end="[/THINK]")
