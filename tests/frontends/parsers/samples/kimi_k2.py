"""Kimi K2: calls with ids that the model writes."""

from __future__ import annotations

from functools import partial

from ..sample import Call, Sample

_SPECIAL = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_kimi = partial(Sample, tools="kimi_k2")
_TWO = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Zürich <|"}<|tool_call_end|><|tool_call_begin|>functions.clock.now:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>"
)
_CALLS = (
    Call("get_weather", '{"city": "Zürich <|"}', "functions.get_weather:0"),
    Call("clock.now", "{}", "functions.clock.now:1"),
)

SAMPLES = (
    _kimi(text=_TWO, calls=_CALLS),
    _kimi(text=f"I look.{_TWO}", special=_SPECIAL, content="I look.", calls=_CALLS),
    _kimi(
        text="<|tool_calls_section_begin|>\n<|tool_call_begin|> f:7 <|tool_call_argument_begin|> {} <|tool_call_end|>",
        calls=(Call("f", "{}", "f:7"),),
    ),
    # The reasoning's end is missing: the calls end it too.
    _kimi(
        reasoning="kimi_k2",
        text=f"<think>Which?{_TWO}",
        special=_SPECIAL,
        schemas={"get_weather": {}, "clock.now": {}},
        reasons="Which?",
        calls=_CALLS,
    ),
    _kimi(
        text=_TWO.replace("functions.clock.now:1", "functions.get_weather:0"),
        calls=(_CALLS[0], Call("get_weather", "{}", "functions.get_weather:1")),
    ),
    _kimi(reasoning="kimi_k2", text="<think>Hm.</think>Hello", reasons="Hm.", content="Hello"),
    _kimi(
        finish_reason="length",
        text='<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a',
        special=_SPECIAL,
        calls=(Call("f", '{"a', "functions.f:0", is_complete=False),),
    ),
)
