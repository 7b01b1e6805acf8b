"""Calls in reasoning whose end the model omits, and reasoning that contains calls or their markers only as thoughts."""

from __future__ import annotations

from ..sample import Call, Sample

_F = Call("f", '{"a": 1}')
_HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
_CODER = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
_GLM = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
_APERTUS = '<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>'
_NOT_CALLS = (
    "the tag <tool_call>, <tool_call>, ",
    '<tool_call>{"name": <name>, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "example", "arguments": {}}</tool_call> ',
    "<tool_call>\n<function=example>\n<parameter=a>\nvalue\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>",
)

SAMPLES = tuple(
    Sample(
        tools=tools,
        reasoning=reasoning,
        text=text,
        special=special,
        schemas={"f": {"properties": {"a": {"type": "integer"}}}},
        reasons=reasons,
        content=content,
        calls=calls,
    )
    for tools, reasoning, start, end, call, special in (
        ("hermes", "qwen3", "<think>", "</think>", _HERMES, ()),
        ("hermes", "qwen3", "<think>", "</think>", _HERMES, ("<think>", "</think>")),
        ("qwen3_coder", "qwen3", "<think>", "</think>", _CODER, ()),
        ("glm45", "glm45", "<think>", "</think>", _GLM, ()),
        ("apertus", "apertus", "<|inner_prefix|>", "<|inner_suffix|>", _APERTUS, ()),
    )
    for text, reasons, content, calls in (
        (f"{start}Hm.{call}", "Hm.", "", (_F,)),
        (f"{start}{call}\n{call}\n", "", "", (_F, _F)),
        (f"{start}Hm.{call}\n{end}\n\nDone.", f"Hm.{call}\n", "\n\nDone.", ()),
        (f"{start}Hm.{call}{end}{call}", f"Hm.{call}", "", (_F,)),
        *((f"{start}Hm, {text}{end}Yes.", f"Hm, {text}", "Yes.", ()) for text in _NOT_CALLS),
        *((f"{start}Hm, {text}{end}{call}", f"Hm, {text}", "", (_F,)) for text in _NOT_CALLS),
        *((f"{start}Hm, {text}.{call}", f"Hm, {text}.", "", (_F,)) for text in _NOT_CALLS[:3]),
        (f"{start}Hm, <tool_call", "Hm, <tool_call", "", ()),
    )
)
