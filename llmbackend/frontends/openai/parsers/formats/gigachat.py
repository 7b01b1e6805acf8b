"""GigaChat 3: a call as a message of its own, with one JSON object; GigaChat 3.1: behind a marker.

Source: the models' chat templates. They have one call a turn; the marker of 3.1 is what a grammar enforces.
"""

from __future__ import annotations

from ..tables import CallGrammar, JsonCall, MarkedCalls, ToolCallFormat

_MESSAGE = "function call<|role_sep|>\n"

GIGACHAT3 = ToolCallFormat(
    name="gigachat3",
    body=MarkedCalls(
        begin=("<|function_call|>", f"<|message_sep|>\n\n{_MESSAGE}"),
        bare_begin=(_MESSAGE,),
        calls=(JsonCall(),),
        end=("<|message_sep|>",),
    ),
    grammar=CallGrammar(
        call_begin='<|function_call|>{"name": "',
        name_end='", "arguments": ',
        call_end="}",
    ),
    trigger="<|function_call|>",
)
