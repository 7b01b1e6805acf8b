"""JSON objects in markers: Jamba, Phi-4-mini, xLAM, InternLM, LongCat, Nemotron Nano 2, Apertus.

Sources of the last two: the models' chat templates.
"""

from __future__ import annotations

from ..tables import CallGrammar, JsonCall, MarkedCalls, ReasoningFormat, ToolCallFormat

NAME_END = '", "arguments": '
JAMBA = ToolCallFormat(
    name="jamba",
    body=MarkedCalls(begin=("<tool_calls>",), calls=(JsonCall(),), list_begin="[", end=("</tool_calls>",)),
    grammar=CallGrammar(
        begin="<tool_calls>[\n",
        call_begin='    {"name": "',
        name_end=NAME_END,
        call_end="}",
        separator=",\n",
        end="\n]</tool_calls>",
    ),
    trigger="<tool_calls>",
)
PHI4_MINI_JSON = ToolCallFormat(
    name="phi4_mini_json",
    body=MarkedCalls(
        begin=("functools", "<|tool_call|>"), calls=(JsonCall(),), list_begin="[", end=("<|/tool_call|>",)
    ),
    grammar=CallGrammar(
        begin="functools[", call_begin='{"name": "', name_end=NAME_END, call_end="}", separator=", ", end="]"
    ),
    trigger="functools[",
)
XLAM = ToolCallFormat(
    name="xlam",
    body=MarkedCalls(
        begin=("```json", "[TOOL_CALLS]", "<tool_call>"),
        bare_begin=("[",),
        calls=(JsonCall(only_known_names=True),),
        list_begin="[",
        end=("```", "</tool_call>"),
    ),
    grammar=CallGrammar(begin="[", call_begin='{"name": "', name_end=NAME_END, call_end="}", separator=", ", end="]"),
)
INTERNLM = ToolCallFormat(
    name="internlm",
    body=MarkedCalls(
        begin=("<|action_start|>",), list_begin="<|plugin|>", calls=(JsonCall(),), list_end="<|action_end|>"
    ),
    grammar=CallGrammar(
        call_begin='<|action_start|><|plugin|>\n{"name": "', name_end=NAME_END, call_end="}<|action_end|>"
    ),
    trigger="<|action_start|><|plugin|>",
)
LONGCAT = ToolCallFormat(
    name="longcat",
    body=MarkedCalls(begin=("<longcat_tool_call>",), calls=(JsonCall(),), end=("</longcat_tool_call>",)),
    grammar=CallGrammar(
        call_begin='<longcat_tool_call>\n{"name": "',
        name_end=NAME_END,
        call_end="}\n</longcat_tool_call>",
        separator="\n",
    ),
    trigger="<longcat_tool_call>",
)
NEMOTRON_JSON = ToolCallFormat(
    name="nemotron_json",
    body=MarkedCalls(begin=("<TOOLCALL>",), calls=(JsonCall(),), list_begin="[", end=("</TOOLCALL>",)),
    grammar=CallGrammar(
        begin="<TOOLCALL>[",
        call_begin='{"name": "',
        name_end=NAME_END,
        call_end="}",
        separator=", ",
        end="]</TOOLCALL>",
    ),
    trigger="<TOOLCALL>",
)
APERTUS = ToolCallFormat(
    name="apertus",
    body=MarkedCalls(
        begin=("<|tools_prefix|>",), calls=(JsonCall(name_key=""),), list_begin="[", end=("<|tools_suffix|>",)
    ),
    grammar=CallGrammar(
        begin="<|tools_prefix|>[",
        call_begin='{"',
        name_end='": ',
        call_end="}",
        separator=", ",
        end="]<|tools_suffix|>",
    ),
    trigger="<|tools_prefix|>",
)
APERTUS_REASONING = ReasoningFormat(name="apertus", start="<|inner_prefix|>", end="<|inner_suffix|>")
