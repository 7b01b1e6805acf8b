"""DeepSeek V3, R1 and V3.1: the calls of one reply between two markers, all of them special tokens or text."""

from __future__ import annotations

from functools import partial

from ..sample import Call, Sample

_SPECIAL = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_v3 = partial(Sample, tools="deepseek_v3")
_v31 = partial(Sample, tools="deepseek_v31")
_V3_TWO = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Zürich ```"}\n```'
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
_V31_TWO = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich ```"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
_CALLS = (Call("get_weather", '{"city": "Zürich ```"}'), Call("now", "{}"))

SAMPLES = (
    _v3(text=_V3_TWO, calls=_CALLS),
    _v3(text=_V3_TWO, special=_SPECIAL, calls=_CALLS),
    _v3(text=f"I look.{_V3_TWO}", special=_SPECIAL, content="I look.", calls=_CALLS),
    _v3(
        reasoning="deepseek_r1",
        reasoning_is_open=True,
        text=f"\nWhich city?\n</think>\n\n{_V3_TWO}",
        special=_SPECIAL,
        reasons="\nWhich city?\n",
        calls=_CALLS,
    ),
    _v3(
        finish_reason="length",
        text='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": "',
        special=_SPECIAL,
        calls=(Call("f", '{"a": "', is_complete=False),),
    ),
    _v3(text="No call: <｜tool", content="No call: <｜tool"),
    _v31(text=_V31_TWO, calls=_CALLS),
    _v31(text=_V31_TWO, special=_SPECIAL, calls=_CALLS),
    _v31(
        reasoning="deepseek_v3",
        text=f"<think>Which?</think>I look.{_V31_TWO}",
        special=(*_SPECIAL, "<think>", "</think>"),
        reasons="Which?",
        content="I look.",
        calls=_CALLS,
    ),
    _v31(
        finish_reason="length",
        text="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        special=_SPECIAL,
        calls=(Call("f", "", is_complete=False),),
    ),
)
