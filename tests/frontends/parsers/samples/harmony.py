"""Harmony: messages in channels."""

from __future__ import annotations

from ..sample import Call, Sample

_SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
_FINAL = "<|start|>assistant<|channel|>final<|message|>"
_ANALYSIS = "<|channel|>analysis<|message|>"
_CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
_CASES: tuple[tuple[str, str, str, tuple[Call, ...]], ...] = (
    (f"{_ANALYSIS}Hm, 2 < 3.<|end|>{_FINAL}Yes <b>.<|return|>", "Hm, 2 < 3.", "Yes <b>.", ()),
    (f'{_ANALYSIS}Hm.<|end|><|start|>assistant{_CALL}{{"a": "🌦"}}<|call|>', "Hm.", "", (Call("f", '{"a": "🌦"}'),)),
    # The recipient before the channel, at the output's beginning and later.
    (
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>assistant to=functions.g<|channel|>commentary<|message|>{"b": 1}<|call|>',
        "",
        "",
        (Call("f", "{}"), Call("g", '{"b": 1}')),
    ),
    ("<|channel|>commentary<|message|>I look.<|end|>" + _FINAL + "Done.<|return|>", "", "I look.\nDone.", ()),
    (f"{_ANALYSIS}One.<|end|>{_ANALYSIS}Two.<|end|>{_FINAL}Three.", "One.\nTwo.", "Three.", ()),
    (f"{_CALL}<|call|>", "", "", (Call("f", "{}"),)),
    ("No header at all. to=functions.f", "", "No header at all. to=functions.f", ()),
    (f"{_ANALYSIS}<|end|>{_FINAL}", "", "", ()),
    (f"{_ANALYSIS}No end{_CALL}{{}}", "No end", "", (Call("f", "{}"),)),
    ("Quotes <|end|>", "", "Quotes ", ()),
    ("<|start|>" + "no header " * 100, "", "no header " * 100, ()),
)
_WITHOUT_TOOLS: tuple[tuple[str, bool, str, str], ...] = (
    (f"{_ANALYSIS}Hm.<|end|>{_FINAL}Yes.<|return|>", False, "Hm.", "Yes."),
    (f"goes on.<|end|>{_FINAL}Yes.", True, "goes on.", "Yes."),
    (f'{_CALL}{{"a": 1}}<|call|>', False, "", '{"a": 1}'),
)
SAMPLES = (
    *(
        Sample(
            tools="openai",
            reasoning=reasoning,
            text=text,
            special=_SPECIAL,
            reasons=reasons,
            content=content,
            calls=calls,
        )
        for text, reasons, content, calls in _CASES
        for reasoning in ("", "openai_gptoss")
    ),
    *(
        Sample(
            reasoning="openai_gptoss",
            text=text,
            special=_SPECIAL,
            reasoning_is_open=is_open,
            reasons=reasons,
            content=content,
        )
        for text, is_open, reasons, content in _WITHOUT_TOOLS
    ),
    Sample(
        tools="openai",
        text=f'{_CALL}{{"a": 1',
        special=_SPECIAL,
        finish_reason="length",
        calls=(Call("f", '{"a": 1', is_complete=False),),
    ),
    *(
        Sample(
            tools="openai",
            text="<|channel|>commentary to=g<|message|>{}<|call|>",
            special=_SPECIAL,
            schemas=schemas,
            content=content,
            calls=calls,
        )
        for schemas, content, calls in (({"g": {}}, "", (Call("g", "{}"),)), ({"f": {}}, "{}", ()))
    ),
    Sample(tools="openai", text=f"{_FINAL}What <|end|> means.", special=_SPECIAL[:3], content="What <|end|> means."),
)
