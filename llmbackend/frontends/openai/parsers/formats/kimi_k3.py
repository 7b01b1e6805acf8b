"""Kimi K3: channels for reasoning, content and calls, and tags with attributes in them.

All tags are made of the special tokens `<|open|>`, `<|close|>` and `<|sep|>` with text between them. The template has
two ways to write arguments: a tag for each, and one JSON object. Both are read; a grammar enforces the JSON object.
Source: the model's chat template.
"""

from __future__ import annotations

import re

from ..tables import CallGrammar, MarkedCalls, ReasoningFormat, TaggedCall, ToolCallFormat

BEGIN, END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
CALL_END = "<|close|>call<|sep|>"
JSON_BEGIN, JSON_END = '<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"

KIMI_K3 = ToolCallFormat(
    name="kimi_k3",
    body=MarkedCalls(
        begin=(BEGIN,),
        calls=(
            TaggedCall(
                begin="<|open|>call",
                header_end=("<|sep|>",),
                header=re.compile(r'\s+tool="(?P<name>[^\s"<>]{1,256})"(?:\s+index="\d*")?\s*'),
                key_begin="<|open|>argument",
                key_end="<|sep|>",
                key=re.compile(r'\s+key="(?P<name>[^"<>\n]+)"\s+type="(?:(?P<text>string)|\w+)"\s*'),
                value_end="<|close|>argument<|sep|>",
                json_begin=JSON_BEGIN,
                end=(CALL_END,),
            ),
        ),
        call_end=(JSON_END, CALL_END),
        end=(END,),
    ),
    grammar=CallGrammar(
        begin=BEGIN,
        call_begin='<|open|>call tool="',
        name_end=f'" index="1"<|sep|>{JSON_BEGIN}',
        call_end=JSON_END + CALL_END,
        end=END,
    ),
    trigger=BEGIN,
)
KIMI_K3_REASONING = ReasoningFormat(
    name="kimi_k3",
    start="<|open|>think<|sep|>",
    end="<|close|>think<|sep|>",
    content_begin=("<|open|>response<|sep|>",),
    content_end=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)
