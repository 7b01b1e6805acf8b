"""Formats of reasoning, and OpenAI's harmony, whose messages are reasoning, calls and content."""

from __future__ import annotations

from ..tables import CallGrammar, Messages, ReasoningFormat, ToolCallFormat

_HARMONY = Messages(
    start="<|start|>",
    channel="<|channel|>",
    message="<|message|>",
    end=("<|end|>", "<|call|>", "<|return|>"),
    reasoning_channel="analysis",
    content_channels=("final", "commentary"),
    functions="functions.",
)
_HARMONY_CALL = "<|start|>assistant<|channel|>commentary to=functions."
OPENAI = ToolCallFormat(
    name="openai",
    body=_HARMONY,
    grammar=CallGrammar.of(f"{_HARMONY_CALL}… <|constrain|>json<|message|>…<|call|>"),
)
_THINK = (
    *("deepseek_r1", "deepseek_v3", "deepseek_v4", "gigachat35", "glm45", "glm47", "holo2", "kimi_k2", "mimo"),
    *("minimax_m2", "nemotron_v3", "olmo3", "poolside_v1", "qwen3", "step3", "step3p5"),
)


def _in_parts(name: str, start: str, end: str, content: tuple[str, str]) -> ReasoningFormat:
    return ReasoningFormat(name=name, start=start, end=end, content_begin=content[:1], content_end=content[1:])


def _cohere(name: str, content: str) -> ReasoningFormat:
    marks = (f"<|START_{content}|>", f"<|END_{content}|>")
    return _in_parts(name, "<|START_THINKING|>", "<|END_THINKING|>", marks)


REASONING = (
    *(ReasoningFormat(name=name, start="<think>", end="</think>") for name in _THINK),
    _in_parts("ernie45", "<think>", "</think>", ("<response>\n", "\n</response>")),
    _in_parts("hunyuan_a13b", "<think>", "</think>", ("<answer>\n", "\n</answer>")),
    ReasoningFormat(name="hy_v3", start="<think:opensource>", end="</think:opensource>"),
    ReasoningFormat(name="apertus", start="<|inner_prefix|>", end="<|inner_suffix|>"),
    _cohere("cohere_command3", "RESPONSE"),
    _cohere("cohere_command4", "TEXT"),
    ReasoningFormat(name="gemma4", start="<|channel>thought\n", end="<channel|>"),
    ReasoningFormat(name="granite", start="Here is my thought process:", end="Here is my response:"),
    ReasoningFormat(
        name="kimi_k3",
        start="<|open|>think<|sep|>",
        end="<|close|>think<|sep|>",
        content_begin=("<|open|>response<|sep|>",),
        content_end=("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    ReasoningFormat(name="minimax_m3", start="<mm:think>", end="</mm:think>"),
    ReasoningFormat(name="mistral", start="[THINK]", end="[/THINK]"),
    ReasoningFormat(name="openai_gptoss", start="<|channel|>analysis<|message|>", end="<|end|>", messages=_HARMONY),
    ReasoningFormat(name="seed_oss", start="<seed:think>", end="</seed:think>"),
    ReasoningFormat(name="solar_open2", start="<|think:start|>", end="<|think:end|>"),
)
