"""Cohere's Command R7B and Command A: a list of JSON objects with names of its own; content in markers.

The ids that the model writes count the calls of a conversation, as its template does anew each time: they are left out.
Source: the models' chat templates. Citations (`<co>`), which only a template option asks for, stay in the text.
"""

from __future__ import annotations

from dataclasses import replace

from ..tables import CallGrammar, JsonCall, MarkedCalls, ReasoningFormat, ToolCallFormat

COHERE_COMMAND3 = ToolCallFormat(
    name="cohere_command3",
    body=MarkedCalls(
        begin=("<|START_ACTION|>",),
        calls=(JsonCall(name_key="tool_name", id_key=""),),
        list_begin="[",
        end=("<|END_ACTION|>",),
    ),
    grammar=CallGrammar(
        begin="<|START_ACTION|>[\n",
        call_begin='    {"tool_call_id": "0", "tool_name": "',
        name_end='", "parameters": ',
        call_end="}",
        separator=",\n",
        end="\n]<|END_ACTION|>",
    ),
    trigger="<|START_ACTION|>",
)
COHERE_COMMAND4 = replace(COHERE_COMMAND3, name="cohere_command4")


def _reasoning(name: str, content: str) -> ReasoningFormat:
    return ReasoningFormat(
        name=name,
        start="<|START_THINKING|>",
        end="<|END_THINKING|>",
        content_begin=(f"<|START_{content}|>",),
        content_end=(f"<|END_{content}|>",),
    )


COHERE_COMMAND3_REASONING = _reasoning("cohere_command3", "RESPONSE")
COHERE_COMMAND4_REASONING = _reasoning("cohere_command4", "TEXT")
