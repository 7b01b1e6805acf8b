"""Harmony, which gpt-oss writes: messages in channels for reasoning, calls and content."""

from __future__ import annotations

from ..tables import CallGrammar, Messages, ReasoningFormat, ToolCallFormat

_MESSAGES = Messages(
    start="<|start|>",
    channel="<|channel|>",
    message="<|message|>",
    end=("<|end|>", "<|call|>", "<|return|>"),
    reasoning_channel="analysis",
    functions="functions.",
)

OPENAI = ToolCallFormat(
    name="openai",
    body=_MESSAGES,
    grammar=CallGrammar(
        call_begin="<|start|>assistant<|channel|>commentary to=functions.",
        name_end=" <|constrain|>json<|message|>",
        call_end="<|call|>",
    ),
    trigger="<|start|>assistant<|channel|>commentary to=functions.",
)
OPENAI_GPTOSS = ReasoningFormat(
    name="openai_gptoss",
    start="<|channel|>analysis<|message|>",
    end="<|end|>",
    messages=_MESSAGES,
)
