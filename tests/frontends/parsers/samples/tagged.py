"""GLM, MiniMax M2, Seed OSS, DeepSeek V3.2 and V4, Hy3, Step 3, Kimi K3: tagged parameters, no layout in values."""

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
_DSML = (
    f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="text" string="true">{_TEXT}'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="count" string="false">3</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="map" string="false">{_MAP}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
_HY3 = (
    f"<tool_calls:o>\n<tool_call:o>f<tool_sep:o>\n<arg_key:o>text</arg_key:o>\n<arg_value:o>{_TEXT}</arg_value:o>\n"
    "<arg_key:o>count</arg_key:o>\n<arg_value:o>3</arg_value:o>\n"
    f"<arg_key:o>map</arg_key:o>\n<arg_value:o>{_MAP}</arg_value:o>\n</tool_call:o>\n"
    "<tool_call:o>now<tool_sep:o>\n</tool_call:o>\n</tool_calls:o>"
).replace(":o>", ":opensource>")
_STEP3 = (
    '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">\n'
    f'<steptml:parameter name="text">{_TEXT}</steptml:parameter>\n<steptml:parameter name="count">3'
    f'</steptml:parameter>\n<steptml:parameter name="map">{_MAP}</steptml:parameter>\n</steptml:invoke>'
    '<｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now">\n</steptml:invoke>'
    "<｜tool_call_end｜>\n<｜tool_calls_end｜>"
)
_KIMI_K3 = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="text" type="string"<|sep|>'
    f'{_TEXT}<|close|>argument<|sep|><|open|>argument key="count" type="number"<|sep|>3<|close|>argument<|sep|>'
    f'<|open|>argument key="map" type="object"<|sep|>{_MAP}<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
)
_SOLAR = (
    f"<|tool_call:start|>f\n<|tool_arg:start|>text<|tool_arg:value|>{_TEXT}<|tool_arg:end|>\n"
    "<|tool_arg:start|>count<|tool_arg:value|>3<|tool_arg:end|>\n"
    f"<|tool_arg:start|>map<|tool_arg:value|>{_MAP}<|tool_arg:end|>\n<|tool_call:end|>\n"
    "<|tool_call:start|>now\n<|tool_call:end|>"
)
_MINICPM = (
    f'<function name="f"><param name="text"><![CDATA[{_TEXT}]]></param><param name="count">3</param>'
    f'<param name="map">{_MAP}</param></function>\n<function name="now"></function>'
)
_FORMS = (
    ("dots", _MINIMAX.replace("minimax:tool_call", "dots_function_call")),
    ("gigachat35", _DSML.replace("DSML", "GCML")),
    ("minicpm5", _MINICPM),
    ("solar_open2", _SOLAR),
    ("glm45", _GLM45),
    ("glm45", _GLM47),
    ("glm47", _GLM47),
    ("poolside_v1", _GLM47),
    ("minimax_m2", _MINIMAX),
    ("seed_oss", _SEED),
    ("deepseek_v32", _DSML.replace("tool_calls", "function_calls")),
    ("deepseek_v4", _DSML),
    ("hy_v3", _HY3),
    ("step3", _STEP3),
    ("kimi_k3", _KIMI_K3),
)
_GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_MARKERS = {
    "dots": ("<dots_function_call>", "</dots_function_call>"),
    "gigachat35": ("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>"),
    "minicpm5": ("<function name=", "</function>", "</param>"),
    "solar_open2": (
        "<|tool_call:start|>",
        "<|tool_arg:start|>",
        "<|tool_arg:value|>",
        "<|tool_arg:end|>",
        "<|tool_call:end|>",
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "poolside_v1": _GLM,
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "deepseek_v32": ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    "deepseek_v4": ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    "hy_v3": tuple(f"<{end}{tag}:opensource>" for tag in ("tool_calls", "arg_key", "arg_value") for end in ("", "/")),
    "step3": (
        "<｜tool_calls_begin｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_sep｜>",
        "<｜tool_call_end｜>",
        "<｜tool_calls_end｜>",
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
}
_DSML_TYPES = (
    '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="text" string="false">5</｜DSML｜parameter>'
    '<｜DSML｜parameter name="count" string="true">5</｜DSML｜parameter>'
    '<｜DSML｜parameter name="other" string="false">[1]</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>'
)
_JSON_BLOCK = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"text": "<|sep"}'
    '<|close|>json<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>"
)

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
    # Text between the parameters and the end is no second call.
    *(
        Sample(
            tools=name,
            text=f"{call}\nstray{end}",
            calls=(Call("f", '{"count": 3', is_complete=False),),
            content=f"\nstray{end}",
            schemas=_SCHEMAS,
        )
        for name, call, end in (
            ("glm45", "<tool_call>f\n<arg_key>count</arg_key>\n<arg_value>3</arg_value>", "</tool_call>"),
            (
                "solar_open2",
                "<|tool_call:start|>f\n<|tool_arg:start|>count<|tool_arg:value|>3<|tool_arg:end|>",
                "<|tool_call:end|>",
            ),
        )
    ),
    Sample(tools="minimax_m2", text="<minimax:tool_call>\nno", content="<minimax:tool_call>\nno"),
    Sample(
        tools="minimax_m2",
        text="<minimax:tool_call><invoke name=now></invoke></minimax:tool_call>",
        calls=(Call("now", "{}"),),
        schemas=_SCHEMAS,
    ),
    # The model says which values are text; what is none follows the schema.
    Sample(
        tools="deepseek_v4",
        text=_DSML_TYPES,
        calls=(Call("f", '{"text": "5", "count": "5", "other": [1]}'),),
        schemas=_SCHEMAS,
    ),
    Sample(
        tools="deepseek_v32",
        text='<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="text">1</｜DSML｜parameter>'
        "</｜DSML｜invoke>",
        calls=(Call("f", '{"text": "1"}'),),
        schemas=_SCHEMAS,
    ),
    *(
        Sample(
            tools="kimi_k3",
            text=_JSON_BLOCK,
            special=special,
            calls=(Call("f", '{"text": "<|sep"}'), Call("now", "{}")),
            schemas=_SCHEMAS,
        )
        for special in ((), _MARKERS["kimi_k3"])
    ),
    Sample(tools="step3", text="<｜tool_calls_begin｜>no", content="<｜tool_calls_begin｜>no"),
    *(
        Sample(tools="minicpm5", text=text, calls=calls, schemas=_SCHEMAS, content=content, finish_reason=reason)
        for text, calls, content, reason in (
            (
                '<function name="f"><param name="text"><![CDATA[<param name="a"></param>]]]></param></function>',
                (Call("f", '{"text": "<param name=\\"a\\"></param>]"}'),),
                "",
                "stop",
            ),
            (
                "<function name='f'><param name='text'>plain</param><param name='map'><![CDATA[{\"a\": 1}]]></param>"
                "</function>",
                (Call("f", '{"text": "plain", "map": {"a": 1}}'),),
                "",
                "stop",
            ),
            (
                '<function name="f"><param name="text"><![CDATA[half',
                (Call("f", '{"text": "half', is_complete=False),),
                "",
                "length",
            ),
            (
                '<function name="f"><param name="text">a <![CDATA[<]]> b</param></function>',
                (Call("f", '{"text": "a < b"}'),),
                "",
                "stop",
            ),
            ("The tag <function name= is text.", (), "The tag <function name= is text.", "stop"),
        )
    ),
    # The value's end is missing; the calls end the reasoning too.
    Sample(
        tools="solar_open2",
        reasoning="solar_open2",
        reasoning_is_open=True,
        text="Hm.<|tool_call:start|>f\n<|tool_arg:start|>text<|tool_arg:value|>x<|tool_arg:start|>count<|tool_arg:value|>3"
        "<|tool_arg:end|><|tool_call:end|>",
        reasons="Hm.",
        calls=(Call("f", '{"text": "x", "count": 3}'),),
        schemas=_SCHEMAS,
    ),
)
