"""Which parsers are found from a chat template: for real ones, and for markers that no package at hand shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmbackend.frontends.generation.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS, detect
from tests.helpers.chat_templates import AXOLOTL, LLAMA_CPP, TRL, chat_template

NONE = ("", "")
SHIPPED = [
    (TRL, "qwen2_5", ("hermes", "")),
    (TRL, "qwen3", ("hermes", "qwen3")),
    (TRL, "qwen3_instruct_2507", ("hermes", "")),
    (TRL, "qwen3_5_think", ("qwen3_coder", "qwen3")),
    (TRL, "nemotron_3_nano", ("qwen3_coder", "qwen3")),
    (TRL, "deepseekv3", ("deepseek_v3", "deepseek_r1")),
    (TRL, "deepseek_r1_distill", ("deepseek_v3", "deepseek_r1")),
    (TRL, "glm4moe", ("glm45", "glm45")),
    (TRL, "gptoss", ("openai", "openai_gptoss")),
    (TRL, "llama3_1", ("llama3_json", "")),
    (TRL, "llama3_2", ("llama3_json", "")),
    (TRL, "gemma4", ("gemma4", "gemma4")),
    (TRL, "lfm2_v2", ("lfm2", "")),
    (TRL, "llama3", NONE),
    (TRL, "gemma3", NONE),
    (TRL, "phi3_5", NONE),
    (TRL, "cohere2", NONE),
    (TRL, "lfm2", ("lfm2", "")),
    (AXOLOTL, "mistral_v3_tekken", ("mistral", "")),
    (AXOLOTL, "llama4", ("llama4_pythonic", "")),
    (AXOLOTL, "jamba", ("jamba", "")),
    (AXOLOTL, "qwen_25", ("hermes", "")),
    (AXOLOTL, "chatml", NONE),
    (AXOLOTL, "exaone4", ("hermes", "deepseek_r1")),
    (AXOLOTL, "command_a_tool_use", ("cohere_command3", "cohere_command3")),
    (LLAMA_CPP, "Apertus-8B-Instruct", ("apertus", "apertus")),
    (LLAMA_CPP, "Apriel-1.6-15b-Thinker-fixed", ("hunyuan_a13b", "")),
    (LLAMA_CPP, "Cohere2MoE", ("cohere_command4", "cohere_command4")),
    (LLAMA_CPP, "GigaChat3.1-10B-A1.8B", ("gigachat3", "")),
    (LLAMA_CPP, "Kimi-K3", ("kimi_k3", "kimi_k3")),
    (LLAMA_CPP, "LFM2-8B-A1B", ("lfm2", "")),
    (LLAMA_CPP, "LFM2.5-Instruct", ("lfm2", "qwen3")),
    (LLAMA_CPP, "NVIDIA-Nemotron-Nano-v2", ("nemotron_json", "deepseek_r1")),
    (LLAMA_CPP, "Spark2.5", ("glm47", "deepseek_r1")),
    (LLAMA_CPP, "StepFun3.5-Flash", ("qwen3_coder", "qwen3")),
    (LLAMA_CPP, "deepseek-ai-DeepSeek-V3.2", ("deepseek_v32", "deepseek_v3")),
    (LLAMA_CPP, "deepseek-ai-DeepSeek-V4", ("deepseek_v4", "deepseek_v3")),
    (LLAMA_CPP, "inclusionai-ling-3.0-flash", ("glm45", "deepseek_r1")),
    (LLAMA_CPP, "muse-glimmer", NONE),
    (LLAMA_CPP, "openbmb-MiniCPM5-1B", ("minicpm5", "qwen3")),
    (LLAMA_CPP, "poolside-Laguna-S-2.1", ("glm45", "deepseek_r1")),
    (LLAMA_CPP, "tencent-Hy3", ("hy_v3", "hy_v3")),
    (LLAMA_CPP, "upstage-Solar-Open-100B", NONE),
    (LLAMA_CPP, "ByteDance-Seed-OSS", ("seed_oss", "seed_oss")),
    (LLAMA_CPP, "GLM-4.6", ("glm45", "glm45")),
    (LLAMA_CPP, "GLM-4.7-Flash", ("glm47", "glm45")),
    (LLAMA_CPP, "Kimi-K2-Instruct", ("kimi_k2", "")),
    (LLAMA_CPP, "Kimi-K2-Thinking", ("kimi_k2", "kimi_k2")),
    (LLAMA_CPP, "MiniMax-M1", ("minimax", "")),
    (LLAMA_CPP, "MiniMax-M2", ("minimax_m2", "minimax_m2")),
    (LLAMA_CPP, "MiniMax-M3", ("minimax_m3", "minimax_m3")),
    (LLAMA_CPP, "Mistral-Small-3.2-24B-Instruct-2506", ("mistral", "")),
    (LLAMA_CPP, "mistralai-Ministral-3-14B-Reasoning-2512", ("mistral", "mistral")),
    (LLAMA_CPP, "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", ("hermes", "")),
    (LLAMA_CPP, "Qwen-QwQ-32B", ("hermes", "qwen3")),
    (LLAMA_CPP, "Qwen3-Coder", ("qwen3_coder", "")),
    (LLAMA_CPP, "deepseek-ai-DeepSeek-V3.1", ("deepseek_v31", "deepseek_v3")),
    (LLAMA_CPP, "ibm-granite-granite-3.3-2B-Instruct", ("granite", "deepseek_r1")),
    (LLAMA_CPP, "ibm-granite-granite-4.0", ("granite4", "")),
    (LLAMA_CPP, "meetkai-functionary-medium-v3.1", NONE),
    (LLAMA_CPP, "meetkai-functionary-medium-v3.2", NONE),
    (LLAMA_CPP, "CohereForAI-c4ai-command-r7b-12-2024-tool_use", ("cohere_command3", "cohere_command3")),
    (LLAMA_CPP, "GigaChat3-10B-A1.8B", ("gigachat3", "")),
]


@pytest.mark.parametrize(("package", "name", "formats"), SHIPPED, ids=[f"{one[0]}-{one[1]}" for one in SHIPPED])
def test_formats_are_found_from_the_templates_of_real_models(package: str, name: str, formats: tuple[str, str]) -> None:
    assert detect(chat_template(package, name)) == formats


@pytest.mark.parametrize(
    ("excerpt", "formats"),
    [
        ("{{ '<start_function_call>call:' + call.name }}", ("functiongemma", "")),
        ("functools[{...}, ...]<|end|>{{ '<|system|>' }}", ("phi4_mini_json", "")),
        ("<|system|>{{ message.content }}<|tool|>{{ message.tools }}<|/tool|>", ("phi4_mini_json", "")),
        ("{{ '<|action_start|><|plugin|>' + call }}", ("internlm", "")),
        ("Use the exact format: [func_name1(param1=value1), func_name2(...)]", ("pythonic", "")),
        ("<|header_start|>Use the exact format: [func_name1(param1=value1)]", ("llama4_pythonic", "")),
        ('in a single JSON array: [{"name": "tool_call_name", "arguments": {}}]', ("xlam", "")),
        ("{{ 'Here is my thought process:' }}", ("", "granite")),
        ("{{ '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=' + name }}", ("step3", "")),
        ("You do not currently have access to any functions.{{ '<function_calls>' + calls }}", ("olmo3", "")),
        ("<tool_calls>[{...}]</tool_calls>{{ '<|extra_0|>' }}{{ '<think>\\n\\n</think>\\n' }}", ("hunyuan_a13b",) * 2),
        ("{{ '<｜GCML｜tool_calls>' }}<think>{{ '</think>' }}", ("gigachat35", "gigachat35")),
        ("{{ '<|think:start|><|tool_call:start|>' + name }}<|tool_arg:start|>", ("solar_open2", "solar_open2")),
        ("{{ '<dots_function_call>' + calls }}", ("dots", "")),
        ("<function_calls>{{ calls }}</function_calls>", NONE),
        ("", NONE),
        ("{{ messages[0].content }}", NONE),
    ],
)
def test_formats_are_found_by_their_markers(excerpt: str, formats: tuple[str, str]) -> None:
    assert detect(excerpt) == formats


def test_the_bundled_models_format_is_found() -> None:
    assert detect(Path("model_repository/demo/1/chat_template.jinja").read_text()) == ("hermes", "")


@pytest.mark.parametrize("formats", sorted({formats for *_, formats in SHIPPED}))
def test_what_is_found_is_registered(formats: tuple[str, str]) -> None:
    tools, reasoning = formats
    assert not tools or tools in TOOL_CALL_FORMATS
    assert not reasoning or reasoning in REASONING_FORMATS
