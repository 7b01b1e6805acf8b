"""Hermes: calls in `<tool_call>` tags, alone and behind Qwen3's reasoning."""

from __future__ import annotations

from functools import partial

from ..sample import Call, Sample

_hermes = partial(Sample, tools="hermes")
_TWO = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich \\"}] 🌦", "days": [1, {"a": 2.5}]}}\n'
    '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
_TWO_CALLS = (Call("get_weather", '{"city": "Zürich \\"}] 🌦", "days": [1, {"a": 2.5}]}'), Call("now", "{}"))

SAMPLES = (
    _hermes(
        text="Just text with <b>tags</b>, <, << and <tool_cal.",
        content="Just text with <b>tags</b>, <, << and <tool_cal.",
    ),
    _hermes(text=" \n", content=" \n"),
    _hermes(text=_TWO, calls=_TWO_CALLS),
    _hermes(text=_TWO, calls=_TWO_CALLS, special=("<tool_call>", "</tool_call>")),
    _hermes(text=f"Let me look.\n\n{_TWO}\n", content="Let me look.\n\n", calls=_TWO_CALLS),
    _hermes(text=f"{_TWO}\nThat is all.", content="\nThat is all.", calls=_TWO_CALLS),
    _hermes(
        reasoning="qwen3",
        text=f"<think>\nA call, </thin.\n</think>\n\n{_TWO}",
        special=("<think>", "</think>"),
        reasons="\nA call, </thin.\n",
        calls=_TWO_CALLS,
    ),
    _hermes(text='<tool_call>{"arguments": {"x": [1]}, "name": "f"}</tool_call>', calls=(Call("f", '{"x": [1]}'),)),
    _hermes(text='<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', calls=(Call("f", '{"x": 1}'),)),
    _hermes(text='<tool_call>{"name": "f"}</tool_call>', calls=(Call("f", "{}"),)),
    _hermes(text='<tool_call>{"id": "a", "name": "f"}</tool_call>', calls=(Call("f", "{}", "a"),)),
    *(
        _hermes(text=f'<tool_call>{{"id": {id}, "name": "f", "arguments": {{}}}}</tool_call>', calls=(Call("f", "{}"),))
        for id in ("7", "null", '""', '{"a": [1]}')
    ),
    _hermes(text='<tool_call>{"name": "f", "arguments": null}</tool_call>', calls=(Call("f", "{}"),)),
    _hermes(
        text='<tool_call>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</tool_call>',
        calls=(Call("f", '{"a": 1}'), Call("g", "{}")),
    ),
    # A bracket or the closing tag is missing.
    _hermes(
        text='<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call><tool_call>{"name": "g", "arguments": {}}',
        calls=(Call("f", '{"a": 1}'), Call("g", "{}")),
    ),
    # Cut off.
    _hermes(
        finish_reason="length",
        text='<tool_call>\n{"name": "f", "arguments": {"text": "half',
        calls=(Call("f", '{"text": "half', is_complete=False),),
    ),
    _hermes(finish_reason="length", text='<tool_call>\n{"name": "f", "arg', calls=(Call("f", "", is_complete=False),)),
    _hermes(finish_reason="length", text='<tool_call>\n{"na', content='<tool_call>\n{"na'),
    _hermes(
        finish_reason="length", text='<tool_call>{"name": "f", "arguments": {}}\n</tool_', calls=(Call("f", "{}"),)
    ),
    _hermes(
        text='<tool_call>{"name": "f", "arguments": {"a": "cut by a token</tool_call>Text',
        special=("</tool_call>",),
        calls=(Call("f", '{"a": "cut by a token', is_complete=False),),
        content="Text",
    ),
    # No calls.
    _hermes(text="<tool_call>no JSON</tool_call>", content="<tool_call>no JSON</tool_call>"),
    _hermes(text="<tool_call>{}</tool_call>", content="<tool_call>{}</tool_call>"),
    _hermes(text='<tool_call>{"name": "f", "arguments": 5}', content='<tool_call>{"name": "f", "arguments": 5}'),
    _hermes(text="<tool_call>no</tool_call>", special=("<tool_call>", "</tool_call>", "</s>"), content="no"),
    _hermes(text='<tool_call><tool_call>{"name": "f"}', content="<tool_call>", calls=(Call("f", "{}"),)),
)
