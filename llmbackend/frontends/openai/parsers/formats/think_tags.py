"""Reasoning in `<think>` tags, which most families use."""

from __future__ import annotations

from ..tables import ReasoningFormat

QWEN3 = ReasoningFormat(name="qwen3", start="<think>", end="</think>")
DEEPSEEK_R1 = ReasoningFormat(name="deepseek_r1", start="<think>", end="</think>")
