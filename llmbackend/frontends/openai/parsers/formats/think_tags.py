"""Reasoning in `<think>` tags, which most families use, under the names that vLLM has for each of them."""

from __future__ import annotations

from ..tables import ReasoningFormat

_NAMES = (
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "gigachat35",
    "glm45",
    "glm47",
    "holo2",
    "mimo",
    "minimax_m2",
    "nemotron_v3",
    "olmo3",
    "poolside_v1",
    "qwen3",
    "step3",
    "step3p5",
)
THINK_TAGS = (
    *(ReasoningFormat(name=name, start="<think>", end="</think>") for name in _NAMES),
    *(
        ReasoningFormat(
            name=name, start="<think>", end="</think>", content_begin=(f"<{tag}>\n",), content_end=(f"\n</{tag}>",)
        )
        for name, tag in (("ernie45", "response"), ("hunyuan_a13b", "answer"))
    ),
    ReasoningFormat(name="kimi_k2", start="<think>", end="</think>", ended_by=("<|tool_calls_section_begin|>",)),
    ReasoningFormat(name="hy_v3", start="<think:opensource>", end="</think:opensource>"),
)
