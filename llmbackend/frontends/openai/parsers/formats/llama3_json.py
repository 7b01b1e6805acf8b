"""Llama 3.x: JSON objects as the whole reply, without a marker or behind `<|python_tag|>`. Also Llama 4 (JSON)."""

from __future__ import annotations

from ..tables import CallGrammar, JsonCall, MarkedCalls, ToolCallFormat

# Nothing but its fields and its name tells a call from an answer in JSON.
_BODY = MarkedCalls(
    begin=("<|python_tag|>",),
    bare_begin=("{",),
    calls=(JsonCall(other_keys=("type",), only_known_names=True),),
    separators=(";", ","),
)
_GRAMMAR = CallGrammar(call_begin='{"name": "', name_end='", "parameters": ', call_end="}", separator="; ")

LLAMA3_JSON = ToolCallFormat(name="llama3_json", body=_BODY, grammar=_GRAMMAR, trigger='{"name": "')
LLAMA4_JSON = ToolCallFormat(name="llama4_json", body=_BODY, grammar=_GRAMMAR, trigger='{"name": "')
