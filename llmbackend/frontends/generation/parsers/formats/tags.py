"""Formats of calls with a tag for each parameter.

A format is specified as the text that its models write, with `…` for names, arguments and values; the markers for the
parser are the lines of that text. Sources: the models' chat templates; for DeepSeek V3.2 and V4, llama.cpp and the
encoders shipped with the weights; for Dots and Step 3, SGLang's descriptions; for Solar Open 2, vLLM's.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ..tables import CallGrammar, MarkedCalls, NestedCall, TaggedCall, ToolCallFormat


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line for line in text.split("\n") if line)


def _tagged(
    name: str,
    call: str,
    parameter: str,
    *,
    section: tuple[str, str] = ("", ""),
    separator: str = "",
    text_excludes: tuple[str, ...] = (),
    json_key_end: str = "",
    more_begins: tuple[str, ...] = (),
    call_end: tuple[str, ...] = (),
    **read: Any,
) -> ToolCallFormat:
    """The first line before a call's name begins the section of calls, the second line the call. After the arguments,
    the last line ends the section, the line before it the call.

    text_excludes: what a string cannot contain, in addition to its end tag
    more_begins: other texts that begin a section, never produced by grammars
    call_end: texts after a call that are ignored
    read: fields of TaggedCall that differ from the written form
    """
    grammar = CallGrammar.of(
        call, parameter, begin=section[0], separator=separator, end=section[1], json_key_end=json_key_end
    )
    value_end = grammar.value_end.strip()
    section_begin, *own_begin = _lines(grammar.begin + grammar.call_begin)
    *own_end, section_end = _lines(grammar.call_end + grammar.end)
    key_end, *value_begin = _lines(grammar.key_end)
    syntax = TaggedCall(
        begin="".join(own_begin),
        header_end=_lines(grammar.name_end),
        key_begin=grammar.key_begin,
        key_end=key_end,
        value_begin="".join(value_begin),
        value_end=value_end,
        end=tuple(own_end),
        trims_newline=grammar.value_end.startswith("\n"),
    )
    return ToolCallFormat(
        name=name,
        body=MarkedCalls(
            begin=(section_begin, *more_begins),
            calls=(replace(syntax, **read),),
            call_end=call_end,
            end=(section_end,),
        ),
        grammar=replace(grammar, text_excludes=(value_end, *text_excludes)),
    )


def _dsml(name: str, section: str, tag: str = "｜DSML｜") -> ToolCallFormat:
    """In this format, the model marks values that are text."""
    return _tagged(
        name,
        f'<{tag}invoke name="…">\n…</{tag}invoke>\n',
        f'<{tag}parameter name="…" string="true">…</{tag}parameter>\n',
        json_key_end='" string="false">',
        section=(f"<{tag}{section}>\n", f"</{tag}{section}>"),
        begin=f"<{tag}invoke",
        header_end=(">",),
        header=re.compile(r'\s+name="(?P<name>[^\s"<>]{1,256})"\s*'),
        key_begin=f"<{tag}parameter",
        key_end=">",
        key=re.compile(r'\s+name="(?P<name>[^"<>\n]+)"(?:\s+string="(?:(?P<text>true)|false)")?\s*'),
    )


_MAYBE_QUOTED = re.compile(r"""\s*(?P<quote>["']?)(?P<name>[^\s"'<>]{1,256})(?P=quote)\s*""")
_QUOTED_KEY = re.compile(r"""\s*(?P<quote>["'])(?P<name>[^\s"'<>](?:[^"'<>\n]*[^\s"'<>])?)(?P=quote)\s*""")
_QUOTED = re.compile(r"""\s*(?P<quote>["'])(?P<name>[^\s"'<>]{1,256})(?P=quote)\s*""")


def _invocations(name: str, section: str) -> ToolCallFormat:
    return _tagged(
        name,
        '<invoke name="…">\n…</invoke>\n',
        '<parameter name="…">…</parameter>\n',
        section=(f"<{section}>\n", f"</{section}>"),
        begin="<invoke name=",
        header_end=(">",),
        header=_MAYBE_QUOTED,
    )


# Qwen3-Coder, Step 3.5 and MiMo V2. The models sometimes omit `<tool_call>`.
_QWEN3_CODER = _tagged(
    "qwen3_coder",
    "<tool_call>\n<function=…>\n…</function>\n</tool_call>",
    "<parameter=…>\n…\n</parameter>\n",
    separator="\n",
    text_excludes=("<parameter=", "</function>"),
    more_begins=("<function=",),
    may_omit_value_end=True,
)
# GLM 4.5 and 4.6 write each part of a call on its own line. GLM 4.7 and Laguna do not; both forms are parsed.
_GLM45 = _tagged(
    "glm45",
    "<tool_call>…\n…</tool_call>",
    "<arg_key>…</arg_key>\n<arg_value>…</arg_value>\n",
    separator="\n",
)
_GLM47 = replace(
    _GLM45,
    name="glm47",
    grammar=CallGrammar.of(
        "<tool_call>……</tool_call>",
        "<arg_key>…</arg_key><arg_value>…</arg_value>",
        text_excludes=("</arg_value>",),
    ),
)
# The tags of Hy3 end with the name of the release.
_HY3 = "opensource"
# MiniCPM 5 puts text that has several lines or resembles a tag into a CDATA block; grammars never produce one.
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_MINICPM_FUNCTION, _MINICPM_PARAMETER = "<function name=", "<param name="
# MiniMax M3 nests the tags of members and items; grammars produce lists and objects as JSON, which is parsed too.
_MARK = "]<]minimax[>["
_STEP3_CALL, _STEP3_CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
# All tags of Kimi K3 consist of special tokens with text between them. It has two ways to write arguments: one tag
# each, or one JSON object. Both are parsed; grammars enforce the JSON object.
_KIMI, _KIMI_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_KIMI_CALL, _KIMI_CALL_END = "<|open|>call", "<|close|>call<|sep|>"
_KIMI_JSON, _KIMI_JSON_END = '<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"
TAGGED_FORMATS = (
    *(replace(_QWEN3_CODER, name=name) for name in ("qwen3_coder", "qwen3_xml", "mimo", "step3p5")),
    *(_GLM45, _GLM47, replace(_GLM47, name="poolside_v1")),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    _dsml("gigachat35", "tool_calls", "｜GCML｜"),
    _invocations("minimax_m2", "minimax:tool_call"),
    _invocations("dots", "dots_function_call"),
    _tagged(
        "seed_oss",
        "<seed:tool_call>\n<function=…>\n…</function>\n</seed:tool_call>",
        "<parameter=…>…</parameter>\n",
        separator="\n",
    ),
    _tagged(
        "hy_v3",
        f"<tool_call:{_HY3}>…<tool_sep:{_HY3}>\n…</tool_call:{_HY3}>\n",
        f"<arg_key:{_HY3}>…</arg_key:{_HY3}>\n<arg_value:{_HY3}>…</arg_value:{_HY3}>\n",
        section=(f"<tool_calls:{_HY3}>\n", f"</tool_calls:{_HY3}>"),
    ),
    _tagged(
        "solar_open2",
        "<|tool_call:start|>…\n…<|tool_call:end|>",
        "<|tool_arg:start|>…<|tool_arg:value|>…<|tool_arg:end|>\n",
        separator="\n",
        text_excludes=("<|tool_arg:start|>",),
        may_omit_value_end=True,
    ),
    _tagged(
        "step3",
        f'{_STEP3_CALL}function<｜tool_sep｜><steptml:invoke name="…">\n…</steptml:invoke>{_STEP3_CALL_END}\n',
        '<steptml:parameter name="…">…</steptml:parameter>\n',
        section=("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
        call_end=(_STEP3_CALL_END,),
        begin=_STEP3_CALL,
        header=re.compile(r'\s*function\s*<｜tool_sep｜>\s*<steptml:invoke name="(?P<name>[^\s"<>]{1,256})'),
        end=("</steptml:invoke>",),
    ),
    ToolCallFormat(
        name="minicpm5",
        body=MarkedCalls(
            begin=(_MINICPM_FUNCTION,),
            calls=(
                TaggedCall(
                    begin=_MINICPM_FUNCTION,
                    header_end=(">",),
                    header=_QUOTED,
                    key_begin=_MINICPM_PARAMETER,
                    key_end=">",
                    key=_QUOTED_KEY,
                    value_end="</param>",
                    text_begin=_CDATA,
                    text_end=_CDATA_END,
                    end=("</function>",),
                ),
            ),
        ),
        grammar=CallGrammar.of(
            f'{_MINICPM_FUNCTION}"…">…</function>',
            f'{_MINICPM_PARAMETER}"…">…</param>',
            separator="\n",
            text_excludes=("</param>", _CDATA),
        ),
    ),
    ToolCallFormat(
        name="minimax_m3",
        body=MarkedCalls(
            begin=(f"{_MARK}<tool_call>",),
            calls=(NestedCall(begin=f"{_MARK}<invoke name=", header_end=(">",), header=_MAYBE_QUOTED, mark=_MARK),),
            end=(f"{_MARK}</tool_call>",),
        ),
        grammar=CallGrammar.of(
            f'{_MARK}<invoke name="…">…{_MARK}</invoke>\n',
            f"{_MARK}<…>…{_MARK}</…>",
            begin=f"{_MARK}<tool_call>\n",
            end=f"{_MARK}</tool_call>",
            text_excludes=(_MARK,),
        ),
    ),
    ToolCallFormat(
        name="kimi_k3",
        body=MarkedCalls(
            begin=(_KIMI,),
            calls=(
                TaggedCall(
                    begin=_KIMI_CALL,
                    header_end=("<|sep|>",),
                    header=re.compile(r'\s+tool="(?P<name>[^\s"<>]{1,256})"(?:\s+index="\d*")?\s*'),
                    key_begin="<|open|>argument",
                    key_end="<|sep|>",
                    key=re.compile(r'\s+key="(?P<name>[^"<>\n]+)"\s+type="(?:(?P<text>string)|\w+)"\s*'),
                    value_end="<|close|>argument<|sep|>",
                    json_begin=_KIMI_JSON,
                    end=(_KIMI_CALL_END,),
                ),
            ),
            call_end=(_KIMI_JSON_END, _KIMI_CALL_END),
            end=(_KIMI_END,),
        ),
        grammar=CallGrammar.of(
            f'{_KIMI_CALL} tool="…" index="1"<|sep|>{_KIMI_JSON}…{_KIMI_JSON_END}{_KIMI_CALL_END}',
            begin=_KIMI,
            end=_KIMI_END,
        ),
    ),
)
