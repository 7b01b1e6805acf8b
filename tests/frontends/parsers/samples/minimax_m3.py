"""MiniMax M3: tags within tags, which become objects and lists by the function's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..sample import Call, Sample

_MARK = "]<]minimax[>["
_SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "places": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
            "map": {"anyOf": [{"type": "object", "properties": {"item": {"type": "string"}}}, {"type": "null"}]},
            "list": {"type": "array"},
        },
        "$defs": {"Place": {"type": "object", "properties": {"name": {"type": "string"}, "x": {"type": "number"}}}},
    }
}


def _text(calls: str) -> str:
    """`«` stands for the mark."""
    return calls.replace("«", _MARK)


_NESTED = _text(
    '«<tool_call>\n«<invoke name="f">«<text>\nZürich </b> 5\n«</text>«<count>3«</count>«<places>«<item>«<name>1«</name>'
    "«<x>2.5«</x>«</item>«<item>«</item>«</places>«<map>«<item>7«</item>«</map>«<list>«</list>«</invoke>\n"
    '«<invoke name="now">«</invoke>\n«</tool_call>'
)
_NESTED_CALLS = (
    Call(
        "f",
        '{"text": "\\nZürich </b> 5\\n", "count": 3, "places": [{"name": "1", "x": 2.5}, {}], "map": {"item": "7"}, '
        '"list": []}',
    ),
    Call("now", "{}"),
)
_UNKNOWN = _text(
    '«<tool_call>«<invoke name="g">«<a> «<item>1«</item> «<item>«<b>x«</b>«</item>«</a>«<c>«<d>true«</d>«</c>'
    "«<e>[1, 2]«</e>«</invoke>«</tool_call>"
)
_CUT_OFF = (
    (_text('«<tool_call>«<invoke name="f">«<text>half a'), Call("f", '{"text": "half a', is_complete=False)),
    (_text('«<tool_call>«<invoke name="f">«<places>«<item>«<x>2'), Call("f", '{"places": [{"x": 2', is_complete=False)),
    (_text('«<tool_call>«<invoke name="f">«<count>3«</cou'), Call("f", '{"count": 3', is_complete=False)),
    (_text('«<tool_call>«<invoke name="f">'), Call("f", "", is_complete=False)),
)

SAMPLES = (
    *(
        Sample(
            tools="minimax_m3",
            reasoning="minimax_m3",
            text=f"{thinks}{lead}{text}",
            special=special,
            reasons="Hm." if thinks else "",
            content=lead,
            calls=calls,
            schemas=_SCHEMAS,
        )
        for special in ((), (_MARK,))
        for thinks in ("", "<mm:think>Hm.</mm:think>")
        for lead in ("", "I look.")
        for text, calls in (
            (_NESTED, _NESTED_CALLS),
            (_UNKNOWN, (Call("g", '{"a": [1, {"b": "x"}], "c": {"d": true}, "e": [1, 2]}'),)),
        )
    ),
    *(
        Sample(tools="minimax_m3", text=text, calls=(call,), schemas=_SCHEMAS, finish_reason="length")
        for text, call in _CUT_OFF
    ),
    # Ended by the model itself: complete as far as it goes.
    Sample(
        tools="minimax_m3",
        text=_text('«<tool_call>«<invoke name="f">«<places>«<item>«<x>2'),
        calls=(Call("f", '{"places": [{"x": 2}]}'),),
        schemas=_SCHEMAS,
    ),
    Sample(tools="minimax_m3", text=_text("«<tool_call>no"), content=_text("«<tool_call>no")),
    Sample(
        tools="minimax_m3",
        text=_text('«<tool_call>«<invoke name="f">«<text>a«<b>c«</b>«</text>«</invoke>«</tool_call>'),
        calls=(Call("f", '{"text": "a', is_complete=False),),
        content=_text("«<b>c«</b>«</text>«</invoke>«</tool_call>"),
        schemas=_SCHEMAS,
    ),
)
