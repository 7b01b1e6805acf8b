"""Pythonic lists of calls, with and without markers, and Gemma's calls with their own quotes."""

from __future__ import annotations

from functools import partial

from ..sample import Call, Sample

_SCHEMAS: dict[str, dict[str, str]] = {"f": {}, "now": {}}
_pythonic = partial(Sample, tools="pythonic", schemas=_SCHEMAS)
_LIST = "[f(text='Zürich \"[', count=-3, sure=True, none=None, map={'a': [1, 2.5]}), now()]"
_CALLS = (
    Call("f", '{"text": "Zürich \\"[", "count": -3, "sure": true, "none": null, "map": {"a": [1, 2.5]}}'),
    Call("now", "{}"),
)
_PYTHON = ("<|python_start|>", "<|python_end|>")
_LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
_FUNCTIONGEMMA = (
    "<start_function_call>call:f{text:<escape>Zürich \"['{},:<escape>,count:-3,sure:true,list:[1,<escape>x<escape>],"
    "map:{a:{b:2.5}}}<end_function_call><start_function_call>call:now{}<end_function_call>"
)
_GEMMA4 = _FUNCTIONGEMMA.replace("<escape>", '<|"|>').replace("<start_function_call>", "<|tool_call>").replace(
    "<end_function_call>", "<tool_call|>"
)  # fmt: skip
_GEMMA_CALLS = (
    Call(
        "f",
        '{"text": "Zürich \\"[\'{},:", "count": -3, "sure": true, "list": [1, "x"], "map": {"a": {"b": 2.5}}}',
    ),
    Call("now", "{}"),
)
_GEMMA = (
    ("functiongemma", _FUNCTIONGEMMA, ("<start_function_call>", "<end_function_call>", "<escape>")),
    ("gemma4", _GEMMA4, ("<|tool_call>", "<tool_call|>", '<|"|>')),
)

SAMPLES = (
    _pythonic(text=_LIST, calls=_CALLS),
    _pythonic(
        text='[f(a=true, b=null, c="\\u00e4\\n")]', calls=(Call("f", r'{"a": true, "b": null, "c": "\u00e4\n"}'),)
    ),
    _pythonic(text=f"Call {_LIST}", content=f"Call {_LIST}"),
    _pythonic(text="[g(a=1)]", content="[g(a=1)]"),
    _pythonic(text="[1, 2] is a list", content="[1, 2] is a list"),
    _pythonic(
        text="[f(text='half of a", finish_reason="length", calls=(Call("f", '{"text": "half of a', is_complete=False),)
    ),
    Sample(tools="llama4_pythonic", text=_LIST, calls=_CALLS, schemas=_SCHEMAS),
    Sample(
        tools="llama4_pythonic",
        text=f"<|python_start|>{_LIST}<|python_end|>",
        special=_PYTHON,
        calls=_CALLS,
        schemas=_SCHEMAS,
    ),
    Sample(tools="lfm2", text=f"<|tool_call_start|>{_LIST}<|tool_call_end|>", special=_LFM2, calls=_CALLS),
    Sample(
        tools="lfm2",
        text=f"<|tool_call_start|>{_LIST}<|tool_call_end|>I look.",
        special=_LFM2,
        calls=_CALLS,
        content="I look.",
    ),
    Sample(
        tools="olmo3",
        text=f"I look.\n<function_calls>\n{_LIST[1:-1].replace('), ', ')' + chr(10))}\n</function_calls>",
        calls=_CALLS,
        content="I look.\n",
    ),
    Sample(
        tools="olmo3",
        text="<function_calls>\nnow()\nno\n</function_calls>",
        calls=(_CALLS[1],),
        content="\nno\n</function_calls>",
    ),
    Sample(tools="olmo3", text="<function_calls>\nno call", content="<function_calls>\nno call"),
    *(
        Sample(tools=name, text=f"{lead}{text}", special=markers, content=lead, calls=_GEMMA_CALLS)
        for name, text, special in _GEMMA
        for lead in ("", "I look.\n")
        for markers in ((), special)
    ),
    *(
        Sample(
            tools=name,
            text=text[: text.index("rich")],
            special=special,
            finish_reason="length",
            calls=(Call("f", '{"text": "Zü', is_complete=False),),
        )
        for name, text, special in _GEMMA
    ),
    Sample(
        tools="gemma4",
        reasoning="gemma4",
        text=f"<|channel>thought\nWhich city?\n<channel|>{_GEMMA4}",
        special=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        reasons="Which city?\n",
        calls=_GEMMA_CALLS,
    ),
)
