"""GLM, MiniMax M2 and Seed OSS: tagged parameters, with no layout around their values."""

from __future__ import annotations

from ..sample import Call, Sample

_SCHEMAS = {
    "f": {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "map": {"type": "object"}}},
    "now": {},
}
_CALLS = (
    Call("f", '{"text": "\\nZürich </b>\\n", "count": 3, "map": {"a": [null]}}'),
    Call("now", "{}"),
)
_TEXT = "\nZürich </b>\n"
_MAP = '{"a": [null]}'
_GLM45 = (
    f"<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>{_TEXT}</arg_value>\n<arg_key>count</arg_key>\n"
    f"<arg_value>3</arg_value>\n<arg_key>map</arg_key>\n<arg_value>{_MAP}</arg_value>\n</tool_call>\n"
    "<tool_call>now\n</tool_call>"
)
_GLM47 = (
    f"<tool_call>f<arg_key>text</arg_key><arg_value>{_TEXT}</arg_value><arg_key>count</arg_key><arg_value>3</arg_value>"
    f"<arg_key>map</arg_key><arg_value>{_MAP}</arg_value></tool_call><tool_call>now</tool_call>"
)
_MINIMAX = (
    f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">{_TEXT}</parameter>\n'
    f'<parameter name="count">3</parameter>\n<parameter name="map">{_MAP}</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
_SEED = (
    f"<seed:tool_call>\n<function=f>\n<parameter=text>{_TEXT}</parameter>\n<parameter=count>3</parameter>\n"
    f"<parameter=map>{_MAP}</parameter>\n</function>\n</seed:tool_call>\n"
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
)
_FORMS = (("glm45", _GLM45), ("glm45", _GLM47), ("glm47", _GLM47), ("minimax_m2", _MINIMAX), ("seed_oss", _SEED))
_MARKERS = {
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "glm47": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
}

SAMPLES = (
    *(
        Sample(tools=name, text=f"{lead}{text}", special=special, content=lead, calls=_CALLS, schemas=_SCHEMAS)
        for name, text in _FORMS
        for lead in ("", "I look.\n\n")
        for special in ((), _MARKERS[name])
    ),
    *(
        Sample(
            tools=name,
            text=text[: text.index("rich")],
            calls=(Call("f", '{"text": "\\nZü', is_complete=False),),
            schemas=_SCHEMAS,
            finish_reason="length",
        )
        for name, text in _FORMS
    ),
    Sample(
        tools="seed_oss",
        reasoning="seed_oss",
        text=f"<seed:think>Hm.</seed:think>\n{_SEED}",
        special=("<seed:think>", "</seed:think>", *_MARKERS["seed_oss"]),
        reasons="Hm.",
        calls=_CALLS,
        schemas=_SCHEMAS,
    ),
    Sample(
        tools="glm45",
        reasoning="glm45",
        text=f"\n<think>Hm.</think>\n{_GLM45}",
        special=_MARKERS["glm45"],
        reasons="Hm.",
        calls=_CALLS,
        schemas=_SCHEMAS,
    ),
    Sample(tools="minimax_m2", text="<minimax:tool_call>\nno", content="<minimax:tool_call>\nno"),
    Sample(
        tools="minimax_m2",
        text="<minimax:tool_call><invoke name=now></invoke></minimax:tool_call>",
        calls=(Call("now", "{}"),),
        schemas=_SCHEMAS,
    ),
)
