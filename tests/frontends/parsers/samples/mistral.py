"""Mistral: lists behind `[TOOL_CALLS]`, and name and arguments since version 11."""

from __future__ import annotations

from ..sample import Call, Sample

_SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>", "[THINK]", "[/THINK]")
_CASES: tuple[tuple[str, str, tuple[Call, ...]], ...] = (
    (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
        "",
        (Call("f", '{"a": [1]}'), Call("g", "{}")),
    ),
    ('[TOOL_CALLS][{"id": "abcdefghi", "name": "f", "arguments": {}}]', "", (Call("f", "{}", "abcdefghi"),)),
    ('[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g[ARGS]{}', "", (Call("f", '{"a": "]"}'), Call("g", "{}"))),
    ('[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "", (Call("f", '{"a": 1}', "abc"),)),
    ('[TOOL_CALLS]f{"a": 1}', "", (Call("f", '{"a": 1}'),)),
    ('I look.[TOOL_CALLS]f[ARGS]{"a": 1}', "I look.", (Call("f", '{"a": 1}'),)),
    ("[TOOL_CALLS]f[ARGS]", "", (Call("f", "", is_complete=False),)),
    ("A list [1, 2] and [TOOL.", "A list [1, 2] and [TOOL.", ()),
)
SAMPLES = (
    *(
        Sample(tools="mistral", text=text, special=special, content=content, calls=calls)
        for text, content, calls in _CASES
        for special in ((), _SPECIAL)
    ),
    Sample(tools="mistral", text="[TOOL_CALLS] [] ok</s>", special=_SPECIAL, content=" [] ok"),
    Sample(
        tools="mistral",
        reasoning="mistral",
        text="[THINK]Hm [1].[/THINK]I look.[TOOL_CALLS]f[ARGS]{}</s>",
        special=_SPECIAL,
        reasons="Hm [1].",
        content="I look.",
        calls=(Call("f", "{}"),),
    ),
)
