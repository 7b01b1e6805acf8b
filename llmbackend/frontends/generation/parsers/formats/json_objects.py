"""Formats of calls with JSON arguments: in one object with the name, or after a header with the name.

A format is specified as the text that its models write, with `…` for the name and the arguments. Sources: the models'
chat templates; vLLM's parsers for xLAM, InternLM and LongCat.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ..tables import CallGrammar, HeadedCall, JsonCall, MarkedCalls, ToolCallFormat

_OBJECT = '{"name": "…", "arguments": …}'


def _json(
    name: str,
    call: str = _OBJECT,
    *,
    begin: str = "",
    separator: str = "",
    end: str = "",
    marker: str = "",
    takes_list: bool = False,
    more_begins: tuple[str, ...] = (),
    more_ends: tuple[str, ...] = (),
    bare_begin: tuple[str, ...] = (),
    form: JsonCall | None = None,
    only_required: bool = False,
) -> ToolCallFormat:
    """The text before the object, without a list's bracket, is the marker that begins a section of calls; the text
    after it ends the section.

    marker: "": as above
    takes_list: a list is parsed, although grammars never produce one
    more_begins, more_ends: markers that are parsed, but never produced by grammars
    """
    before = f"{begin}{call}".partition("{")[0].strip()
    behind = f"{call}{end}".rpartition("}")[2].strip()
    marker, closing = marker or before.removesuffix("["), behind.removeprefix("]")
    separators = (separator.strip(), ",") if separator.strip() not in ("", ",") else (",",)
    return ToolCallFormat(
        name=name,
        body=MarkedCalls(
            begin=(*((marker,) if marker else ()), *more_begins),
            bare_begin=bare_begin,
            calls=(form or JsonCall(),),
            list_begin="[" if takes_list or before.endswith("[") else "",
            separators=separators,
            end=(*((closing,) if closing else ()), *more_ends),
        ),
        grammar=CallGrammar.of(call, begin=begin, separator=separator, end=end),
        only_required=only_required,
    )


# Hermes, Qwen2.5, Qwen3, Granite 4 and ERNIE 4.5.
_HERMES = _json("hermes", f"<tool_call>\n{_OBJECT}\n</tool_call>", separator="\n", takes_list=True)
# Llama 3.x and Llama 4: there is no marker; only its fields and its name distinguish a call from an answer in JSON.
_LLAMA3 = _json(
    "llama3_json",
    '{"name": "…", "parameters": …}',
    separator="; ",
    more_begins=("<|python_tag|>",),
    bare_begin=("{",),
    form=JsonCall(other_keys=("type",), only_known_names=True),
)
# Command R7B and Command A. Call ids are dropped: the model numbers the calls of a conversation, and its template
# numbers them again each time. Citations (`<co>`), which only a template option requests, remain in the text.
_COHERE3 = _json(
    "cohere_command3",
    '    {"tool_call_id": "0", "tool_name": "…", "parameters": …}',
    begin="<|START_ACTION|>[\n",
    separator=",\n",
    end="\n]<|END_ACTION|>",
    form=JsonCall(name_key="tool_name", id_key=""),
)
# GigaChat 3 writes a call as a separate message, GigaChat 3.1 after a marker. Grammars enforce the marker.
_GIGACHAT_MESSAGE = "function call<|role_sep|>\n"
# The arguments are in a code block (V3 and R1), or bare (V3.1).
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_NAME = r"\s*(?P<name>[^\s`<]{1,256})\s*"
# The id of a Kimi K2 call contains the function's name: `functions.f:0`.
_KIMI, _KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MISTRAL_HEADER = re.compile(
    # both are special tokens
    r"\s*(?P<name>[^\s\"'`<>(){}\[\]|]{1,256})\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]]{1,256})\s*)?"
)
JSON_FORMATS = (
    *(replace(_HERMES, name=name) for name in ("hermes", "ernie45", "granite4")),
    *(replace(_LLAMA3, name=name) for name in ("llama3_json", "llama4_json")),
    *(replace(_COHERE3, name=name) for name in ("cohere_command3", "cohere_command4")),
    _json("longcat", f"<longcat_tool_call>\n{_OBJECT}\n</longcat_tool_call>", separator="\n"),
    _json("granite-20b-fc", f"<function_call> {_OBJECT}", separator="\n"),
    _json("minimax", f"{_OBJECT}\n", begin="<tool_calls>\n", end="</tool_calls>"),
    _json("jamba", f"    {_OBJECT}", begin="<tool_calls>[\n", separator=",\n", end="\n]</tool_calls>"),
    _json("hunyuan_a13b", begin="<tool_calls>[", separator=", ", end="]</tool_calls>"),
    _json("nemotron_json", begin="<TOOLCALL>[", separator=", ", end="]</TOOLCALL>"),
    _json(
        "apertus",
        '{"…": …}',
        begin="<|tools_prefix|>[",
        separator=", ",
        end="]<|tools_suffix|>",
        form=JsonCall(name_key=""),
    ),
    _json(
        "phi4_mini_json",
        begin="functools[",
        separator=", ",
        end="]",
        marker="functools[",  # without the bracket, it is a word
        more_begins=("<|tool_call|>",),
        more_ends=("]", "<|/tool_call|>"),
    ),
    _json(
        "granite",
        begin="<|tool_call|>[",
        separator=", ",
        end="]",
        more_begins=("<tool_call>",),
        more_ends=("</tool_call>",),
        bare_begin=("[",),
        form=JsonCall(only_known_names=True),
    ),
    _json(
        "xlam",
        begin="[",
        separator=", ",
        end="]",
        more_begins=("```json", "[TOOL_CALLS]", "<tool_call>"),
        more_ends=("```", "</tool_call>"),
        bare_begin=("[",),
        form=JsonCall(only_known_names=True),
        only_required=True,
    ),
    _json(
        "gigachat3",
        f"<|function_call|>{_OBJECT}",
        more_begins=(f"<|message_sep|>\n\n{_GIGACHAT_MESSAGE}",),
        more_ends=("<|message_sep|>",),
        bare_begin=(_GIGACHAT_MESSAGE,),
    ),
    ToolCallFormat(
        name="internlm",
        body=MarkedCalls(
            begin=("<|action_start|>",), list_begin="<|plugin|>", calls=(JsonCall(),), list_end="<|action_end|>"
        ),
        grammar=CallGrammar.of(f"<|action_start|><|plugin|>\n{_OBJECT}<|action_end|>"),
    ),
    ToolCallFormat(
        name="deepseek_v3",
        body=MarkedCalls(
            begin=(_CALLS,),
            calls=(
                HeadedCall(
                    begin=_CALL,
                    header_end=("{",),
                    header=re.compile(rf"\s*\w*\s*{re.escape(_SEPARATOR)}{_DEEPSEEK_NAME}(?:```(?:json)?\s*)?"),
                ),
            ),
            call_end=("```", _CALL_END),
            end=(_CALLS_END,),
        ),
        grammar=CallGrammar.of(
            f"{_CALL}function{_SEPARATOR}…\n```json\n…\n```{_CALL_END}", begin=_CALLS, separator="\n", end=_CALLS_END
        ),
    ),
    ToolCallFormat(
        name="deepseek_v31",
        body=MarkedCalls(
            begin=(_CALLS,),
            calls=(HeadedCall(begin=_CALL, header_end=(_SEPARATOR,), header=re.compile(_DEEPSEEK_NAME)),),
            call_end=(_CALL_END,),
            end=(_CALLS_END,),
        ),
        grammar=CallGrammar.of(f"{_CALL}…{_SEPARATOR}…{_CALL_END}", begin=_CALLS, end=_CALLS_END),
    ),
    ToolCallFormat(
        name="kimi_k2",
        body=MarkedCalls(
            begin=(_KIMI,),
            calls=(
                HeadedCall(
                    begin=_KIMI_CALL,
                    header_end=(_KIMI_ARGUMENTS,),
                    header=re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]{1,256})(?::\d+)?)\s*"),
                ),
            ),
            call_end=(_KIMI_CALL_END,),
            end=(_KIMI_END,),
        ),
        grammar=CallGrammar.of(
            f"{_KIMI_CALL}functions.…:0{_KIMI_ARGUMENTS}…{_KIMI_CALL_END}", begin=_KIMI, end=_KIMI_END, number="0"
        ),
    ),
    # A list of JSON objects, or, since version 11, name and arguments of one call.
    ToolCallFormat(
        name="mistral",
        body=MarkedCalls(
            begin=("[TOOL_CALLS]",),
            calls=(JsonCall(), HeadedCall(header=_MISTRAL_HEADER, header_end=("[ARGS]", "{"))),
            list_begin="[",
        ),
        grammar=CallGrammar.of("[TOOL_CALLS]…[ARGS]…"),
    ),
)
