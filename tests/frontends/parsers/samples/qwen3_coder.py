"""Qwen3-Coder: tagged parameters, whose values become JSON by the function's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sample import Call, Sample

_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "sure": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "list": {"type": "array"},
            "map": {"type": "object"},
            "kind": {"enum": ["a", 1]},
            "any": {"description": "no type"},
            "short": {"type": "string", "maxLength": 9},
            "colour": {"$ref": "#/$defs/Colour"},
            "size": {"allOf": [{"$ref": "#/$defs/Size"}]},
        },
        "$defs": {"Colour": {"type": "string", "enum": ["red", "1"]}, "Size": {"type": "integer"}},
    }
}


def _call(**parameters: str) -> str:
    tagged = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function=f>\n{tagged}</function>\n</tool_call>"


_CASES: tuple[tuple[str, str, tuple[Call, ...]], ...] = (
    (
        _call(text='\nTwo "lines"\\ <b> 🌦\n', count="3", sure="True", map='{"a": [1, "x"]}'),
        "",
        (Call("f", r'{"text": "\nTwo \"lines\"\\ <b> 🌦\n", "count": 3, "sure": true, "map": {"a": [1, "x"]}}'),),
    ),
    (
        _call(maybe="null", list="['a', None]", kind="1", any="[1]", ratio="0.50", unknown="some text"),
        "",
        (
            Call(
                "f",
                '{"maybe": null, "list": ["a", null], "kind": 1, "any": [1], "ratio": 0.50, "unknown": "some text"}',
            ),
        ),
    ),
    (_call(maybe="12", count="many"), "", (Call("f", '{"maybe": "12", "count": "many"}'),)),
    # A narrowed string may also come as JSON; any other string is what it is.
    (
        _call(short='"a"', colour="red", size="3", text='"a"'),
        "",
        (Call("f", r'{"short": "a", "colour": "red", "size": 3, "text": "\"a\""}'),),
    ),
    (_call(colour="1", short="007"), "", (Call("f", '{"colour": "1", "short": "007"}'),)),
    (f"I look.\n{_call()}\n{_call(text='')}\n", "I look.\n", (Call("f", "{}"), Call("f", '{"text": ""}'))),
    # Without the outer tags; without the ends of parameter and function.
    (
        "<function=f>\n<parameter=text>\nx\n</parameter>\n</function>\n<function=g></function>",
        "",
        (Call("f", '{"text": "x"}'), Call("g", "{}")),
    ),
    (
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n<parameter=count>\n1\n</function>\n</tool_call> ok",
        " ok",
        (Call("f", '{"text": "x", "count": 1}'),),
    ),
    (
        "<tool_call>\n<function=f>\n<parameter=count>\n1\n</parameter>\n</tool_call>",
        "",
        (Call("f", '{"count": 1}'),),
    ),
    # No calls.
    ("<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", ()),
    ("The tag <function=f> is text.", "The tag <function=f> is text.", ()),
    (
        "<tool_call>\n<function=f>\n<parameter=text>\nx\n</parameter> stray </function>",
        " stray </function>",
        (Call("f", '{"text": "x"', is_complete=False),),
    ),
)
_CUT_OFF: tuple[tuple[str, str, tuple[Call, ...]], ...] = (
    ("<function=f>\n<parameter=text>\nhalf a\n", "", (Call("f", '{"text": "half a', is_complete=False),)),
    ("<function=f>\n<parameter=count>\n1", "", (Call("f", '{"count": 1', is_complete=False),)),
    ("<function=f>\n<parameter=count>\n1</parameter>", "", (Call("f", '{"count": 1', is_complete=False),)),
    ("<function=f>", "", (Call("f", "", is_complete=False),)),
    ("<tool_call>\n<funct", "<tool_call>\n<funct", ()),
)
_TAGS = ("<tool_call>", "</tool_call>")
SAMPLES = (
    *(
        Sample(tools=name, text=text, special=special, schemas=_SCHEMAS, content=content, calls=calls)
        for name in ("qwen3_coder", "qwen3_xml", "mimo", "step3p5")
        for text, content, calls in _CASES
        for special in ((), _TAGS)
        if calls or not special
    ),
    *(
        Sample(tools="qwen3_coder", text=text, finish_reason="length", schemas=_SCHEMAS, content=content, calls=calls)
        for text, content, calls in _CUT_OFF
    ),
    Sample(
        tools="qwen3_coder",
        text="<function=f>\n<parameter=count>\n1",
        schemas=_SCHEMAS,
        calls=(Call("f", '{"count": 1}'),),
    ),
)
