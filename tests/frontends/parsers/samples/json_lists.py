"""JSON objects in the markers of Jamba, Hunyuan, Phi-4-mini, xLAM, InternLM, LongCat, MiniMax M1, Granite, Cohere, …"""

from __future__ import annotations

from functools import partial

from ..sample import Call, Sample

_SCHEMAS = {"get_weather": {"type": "object"}, "now": {"type": "object"}}
_ARGUMENTS = '{"city": "Zürich ]}"}'
_FIRST = f'{{"name": "get_weather", "arguments": {_ARGUMENTS}}}'
_SECOND = '{"name": "now", "arguments": {}}'
_CALLS = (Call("get_weather", _ARGUMENTS), Call("now", "{}"))
_COHERE = (
    f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {_ARGUMENTS}}},\n'
    '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>'
)
_MARKED = {
    "apertus": f'<|tools_prefix|>[{{"get_weather": {_ARGUMENTS}}}, {{"now": {{}}}}]<|tools_suffix|>',
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "ernie45": f"<tool_call>\n{_FIRST}\n</tool_call>\n<tool_call>\n{_SECOND}\n</tool_call>\n",
    "gigachat3": f"<|function_call|>{_FIRST}<|function_call|>{_SECOND}",
    "nemotron_json": f"<TOOLCALL>[{_FIRST}, {_SECOND}]</TOOLCALL>",
    "jamba": f"<tool_calls>[\n    {_FIRST},\n    {_SECOND}\n]</tool_calls>",
    "hunyuan_a13b": f"<tool_calls>[{_FIRST}, {_SECOND}]</tool_calls>",
    "phi4_mini_json": f"functools[{_FIRST}, {_SECOND}]",
    "internlm": f"<|action_start|><|plugin|>\n{_FIRST}<|action_end|>"
    f"<|action_start|><|plugin|>\n{_SECOND}<|action_end|>",
    "longcat": f"<longcat_tool_call>\n{_FIRST}\n</longcat_tool_call>\n<longcat_tool_call>{_SECOND}</longcat_tool_call>",
    "minimax": f"<tool_calls>\n{_FIRST}\n{_SECOND}\n</tool_calls>",
    "granite": f"<|tool_call|>[{_FIRST}, {_SECOND}]",
    "granite4": f"<tool_call>\n{_FIRST}\n</tool_call>\n<tool_call>\n{_SECOND}\n</tool_call>",
    "granite-20b-fc": f"<function_call> {_FIRST}\n<function_call> {_SECOND}",
    "xlam": f"```json\n[{_FIRST}, {_SECOND}]\n```",
}
_BARE = f"[{_FIRST}, {_SECOND}]"
_granite = partial(Sample, tools="granite", schemas=_SCHEMAS)
_xlam = partial(Sample, tools="xlam", schemas=_SCHEMAS)
_OTHER_LIST = '[{"name": "Ada", "arguments": {}}]'

SAMPLES = (
    *(Sample(tools=name, text=text, calls=_CALLS, schemas=_SCHEMAS) for name, text in _MARKED.items()),
    *(
        Sample(tools=name, text=f"I look. {text}", content="I look. ", calls=_CALLS, schemas=_SCHEMAS)
        for name, text in _MARKED.items()
    ),
    *(
        Sample(
            tools=name,
            text=text[: text.index("Zür")],
            calls=(Call("get_weather", '{"city": "', is_complete=False),),
            schemas=_SCHEMAS,
            finish_reason="length",
        )
        for name, text in _MARKED.items()
    ),
    Sample(tools="phi4_mini_json", text=f"<|tool_call|>[{_FIRST}, {_SECOND}]<|/tool_call|>", calls=_CALLS),
    Sample(
        tools="phi4_mini_json",
        text="functools[1] is a list, functools a module.",
        content="functools[1] is a list, functools a module.",
    ),
    Sample(
        tools="internlm",
        text=_MARKED["internlm"].replace('"arguments"', '"parameters"'),
        special=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        calls=_CALLS,
    ),
    Sample(
        tools="internlm",
        text="<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
        content="<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
    ),
    Sample(
        tools="jamba",
        text='<tool_calls>[{"name": "f", "arguments": "{\\"a\\": 1}"}]</tool_calls>',
        calls=(Call("f", '{"a": 1}'),),
    ),
    _granite(text=_BARE, calls=_CALLS),
    _granite(text=f"<|tool_call|>{_BARE}", special=("<|tool_call|>",), calls=_CALLS),
    _granite(text=f"<tool_call>{_BARE}", calls=_CALLS),
    _granite(text=f"The list is {_BARE}", content=f"The list is {_BARE}"),
    _granite(text=_OTHER_LIST, content=_OTHER_LIST),
    _granite(
        reasoning="granite",
        text=f"Here is my thought process: Hm. Here is my response:\n{_BARE}",
        reasons=" Hm. ",
        calls=_CALLS,
    ),
    _xlam(text=_BARE, calls=_CALLS),
    _xlam(text=f"[TOOL_CALLS]{_BARE}", calls=_CALLS),
    _xlam(reasoning="deepseek_r1", text=f"<think>Hm.</think>{_BARE}", reasons="Hm.", calls=_CALLS),
    _xlam(text="[]", content="[]"),
    _xlam(text='```json\n{"a": 1}\n```', content='```json\n{"a": 1}\n```'),
    *(
        Sample(
            tools="gigachat3",
            text=f"{lead}<|message_sep|>\n\nfunction call<|role_sep|>\n{_FIRST}<|message_sep|>",
            special=special,
            content=lead,
            calls=(_CALLS[0],),
        )
        for lead in ("", "I look.")
        for special in ((), ("<|message_sep|>", "<|role_sep|>"))
    ),
    Sample(tools="gigachat3", text=f"function call<|role_sep|>\n{_FIRST}", calls=(_CALLS[0],)),
    Sample(
        tools="gigachat3",
        text="Two<|message_sep|>\n\nfunctions.",
        special=("<|message_sep|>",),
        content="Two\n\nfunctions.",
    ),
    Sample(tools="apertus", text='<|tools_prefix|>["no"]', content='<|tools_prefix|>["no"]'),
)
