"""Content in markers of its own: Cohere, Kimi K3, ERNIE 4.5, Hunyuan A13B; reasoning in other tags."""

from __future__ import annotations

from ..sample import Call, Sample

_ARGUMENTS = '{"city": "Zürich"}'
_COHERE = (
    f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "f", "parameters": {_ARGUMENTS}}}\n]<|END_ACTION|>'
)
_KIMI = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Zürich'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
_FORMS = (
    ("cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", _COHERE),
    ("cohere_command4", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>", _COHERE),
    (
        "kimi_k3",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        _KIMI,
    ),
    (
        "ernie45",
        "<think>",
        "</think>",
        "\n\n<response>\n",
        "\n</response>\n",
        f'\n\n<tool_call>\n{{"name": "f", "arguments": {_ARGUMENTS}}}\n</tool_call>\n',
    ),
    (
        "hunyuan_a13b",
        "<think>",
        "</think>",
        "\n<answer>\n",
        "\n</answer>",
        f'<tool_calls>[{{"name": "f", "arguments": {_ARGUMENTS}}}]</tool_calls>',
    ),
)
_SPECIAL = {
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "cohere_command4": ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "ernie45": ("<think>", "</think>", "<response>", "</response>"),
    "hunyuan_a13b": (),
}
_CALLS = (Call("f", _ARGUMENTS),)

SAMPLES = (
    *(
        Sample(tools=name, reasoning=name, text=text, special=special, reasons=reasons, content=content, calls=calls)
        for name, start, end, begin, close, call in _FORMS
        for special in ((), _SPECIAL[name])
        for text, reasons, content, calls in (
            (f"{start}Hm.{end}{begin}A <b> \nc.{close}", "Hm.", "A <b> \nc.", ()),
            (f"{start}Hm.{end}{call}", "Hm.", "", _CALLS),
            (f"{start}Hm.{end}{begin}I look.{close}{call}", "Hm.", "I look.", _CALLS),
            (f"{begin}Yes.{close}", "", "Yes.", ()),
            (f"{begin}{close}{call}", "", "", _CALLS),
            (f"Yes.{close}", "", "Yes.", ()),
            (f"{begin}No end <", "", "No end <", ()),
        )
    ),
    # The prompt has begun the content, and the model ends it at once.
    *(
        Sample(tools=name, reasoning=name, text=f"{close}{call}", special=special, calls=_CALLS)
        for name, _, _, _, close, call in _FORMS[:3]
        for special in ((), _SPECIAL[name])
    ),
    *(
        Sample(
            reasoning=name,
            text=f"{start}Hm.{end}Yes.",
            special=special,
            reasons="Hm.",
            content="Yes.",
        )
        for name, start, end in (
            ("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
            ("hy_v3", "<think:opensource>", "</think:opensource>"),
            ("solar_open2", "<|think:start|>", "<|think:end|>"),
        )
        for special in ((), (start, end))
    ),
    Sample(
        reasoning="kimi_k3",
        reasoning_is_open=True,
        text="Hm. <|close|>tool<|sep|><|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>",
        special=_SPECIAL["kimi_k3"],
        reasons="Hm. tool",
        content="Yes.",
    ),
)
