"""The oracle: an assistant's turn, rendered by a model's own chat template and parsed back, gives the same calls.

The parsers are those that are found from the template. What a template itself loses or writes ambiguously (quotes
without escapes, content beside calls) is left out of its turns, by the fields of its Case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from llmbackend.adapter.text.chat_template import ChatTemplate
from llmbackend.frontends.generation.parsers import REASONING_FORMATS, detect
from tests.frontends.parsers.sample import Sample, cut, parse, seen, tokens
from tests.frontends.parsers.turns import SCHEMAS, TYPES, random_calls
from tests.helpers.chat_templates import AXOLOTL, LLAMA_CPP, TRL, chat_template
from tests.helpers.machine_settings import tries

NUM_TURNS = 40
"""Per template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    package: str
    template: str
    end: str
    """What ends the turn."""
    special: tuple[str, ...] = ()
    """Markers that are special tokens."""
    without: str = ""
    """Characters that the template does not write so that they could be read back."""
    types: tuple[str, ...] = TYPES
    max_calls: int = 3
    has_content: bool = True
    has_reasoning: bool = False
    content_is_reasoning: bool = False
    """Whether the template writes content beside calls as reasoning, after the actual one."""
    between_calls: str = ""
    """What separates the messages into which the calls are divided."""
    ids: str = "{number:09}"
    has_ids: bool = False
    """Whether the calls' ids are in the text."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as those that have it open the reasoning."""
    needs_tools: bool = False
    """Whether the template renders nothing without definitions of tools. Some refuse them: their models know none."""


HARMONY = ("<|start|>", "<|end|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
KIMI_K3 = ("<|open|>", "<|close|>", "<|sep|>")
GIGACHAT = ("<|message_sep|>", "<|role_sep|>", "<|function_call|>")
MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
LLAMA_BETWEEN = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
PYTHONIC = ("string", "integer", "boolean", "number", "object")
CASES = (
    Case(package=TRL, template="qwen2_5", end="<|im_end|>"),
    Case(package=TRL, template="qwen3", end="<|im_end|>", has_reasoning=True),
    Case(package=TRL, template="qwen3_5_think", end="<|im_end|>", has_reasoning=True),
    Case(package=TRL, template="nemotron_3_nano", end="<|im_end|>", has_reasoning=True),
    Case(package=TRL, template="deepseekv3", end="<｜end▁of▁sentence｜>"),
    Case(package=TRL, template="glm4moe", end="", has_reasoning=True),
    Case(package=TRL, template="llama3_1", end="<|eot_id|>", has_content=False, between_calls=LLAMA_BETWEEN),
    Case(
        package=TRL,
        template="gptoss",
        end="<|call|>",
        special=HARMONY,
        max_calls=1,
        has_reasoning=True,
        content_is_reasoning=True,
    ),
    Case(package=TRL, template="gemma4", end="<|tool_response>", special=GEMMA, without="<", has_content=False),
    Case(package=TRL, template="lfm2_v2", end="<|im_end|>", special=LFM2, without="'\\", types=PYTHONIC),
    Case(package=AXOLOTL, template="mistral_v3_tekken", end="</s>", special=("[TOOL_CALLS]",), has_content=False),
    Case(package=AXOLOTL, template="jamba", end="<|eom|>", has_content=False),
    Case(package=AXOLOTL, template="command_a_tool_use", end="<|END_OF_TURN_TOKEN|>", has_content=False),
    Case(
        package=LLAMA_CPP,
        template="CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        end="<|END_OF_TURN_TOKEN|>",
        has_content=False,
        has_reasoning=True,
        options={"enable_thinking": True},
    ),
    Case(
        package=LLAMA_CPP,
        template="Cohere2MoE",
        end="<|END_OF_TURN_TOKEN|>",
        has_content=False,
        has_reasoning=True,
    ),
    *(
        Case(
            package=LLAMA_CPP,
            template=f"deepseek-ai-DeepSeek-{version}",
            end="<｜end▁of▁sentence｜>",
            has_reasoning=True,
            options={"thinking": True},
        )
        for version in ("V3.2", "V4")
    ),
    Case(package=LLAMA_CPP, template="Kimi-K3", end="<|end_of_msg|>", special=KIMI_K3, has_reasoning=True),
    Case(package=LLAMA_CPP, template="GigaChat3-10B-A1.8B", end="<|message_sep|>", special=GIGACHAT, max_calls=1),
    Case(package=LLAMA_CPP, template="GigaChat3.1-10B-A1.8B", end="<|message_sep|>", special=GIGACHAT, max_calls=1),
    Case(package=LLAMA_CPP, template="NVIDIA-Nemotron-Nano-v2", end="<SPECIAL_12>", has_content=False),
    Case(package=LLAMA_CPP, template="Apertus-8B-Instruct", end="", special=("<|tools_prefix|>", "<|tools_suffix|>")),
    Case(
        package=LLAMA_CPP,
        template="tencent-Hy3",
        end="<｜hy_eos:opensource｜>",
        has_reasoning=True,
        options={"reasoning_effort": "high"},
    ),
    Case(package=LLAMA_CPP, template="StepFun3.5-Flash", end="<|im_end|>", has_reasoning=True),
    Case(package=LLAMA_CPP, template="poolside-Laguna-S-2.1", end="</assistant>", has_reasoning=True),
    Case(package=LLAMA_CPP, template="inclusionai-ling-3.0-flash", end="<|role_end|>", has_reasoning=True),
    Case(
        package=LLAMA_CPP,
        template="NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        end="<|im_end|>",
        has_content=False,
        needs_tools=True,
    ),
    Case(package=LLAMA_CPP, template="deepseek-ai-DeepSeek-V3.1", end="<｜end▁of▁sentence｜>"),
    Case(
        package=LLAMA_CPP,
        template="moonshotai-Kimi-K2",
        end="<|im_end|>",
        ids="functions.{name}:{number}",
        has_ids=True,
    ),
    Case(package=LLAMA_CPP, template="MiniMax-M1", end="<end_of_sentence>", has_content=False),
    Case(package=LLAMA_CPP, template="MiniMax-M2", end="[e~[", has_reasoning=True),
    Case(
        package=LLAMA_CPP,
        template="MiniMax-M3",
        end="[e~[",
        has_reasoning=True,
        options={"thinking_mode": "enabled"},
        types=("string", "integer", "boolean", "number"),  # of a list's items the schema here says nothing
    ),
    Case(package=LLAMA_CPP, template="GLM-4.6", end="", has_reasoning=True),
    Case(package=LLAMA_CPP, template="GLM-4.7-Flash", end="", has_reasoning=True),
    Case(package=LLAMA_CPP, template="ByteDance-Seed-OSS", end="<seed:eos>", has_reasoning=True),
    Case(package=LLAMA_CPP, template="Qwen3-Coder", end="<|im_end|>"),
    Case(
        package=LLAMA_CPP,
        template="Mistral-Small-3.2-24B-Instruct-2506",
        end="</s>",
        special=MISTRAL,
        has_content=False,
        has_ids=True,
    ),
    Case(package=LLAMA_CPP, template="unsloth-mistral-Devstral-Small-2507", end="</s>", special=MISTRAL),
    Case(package=LLAMA_CPP, template="ibm-granite-granite-4.0", end="<|end_of_text|>"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.template)
def test_a_rendered_turn_parses_back(case: Case) -> None:
    source = chat_template(case.package, case.template)
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    tools, reasoning = detect(source)
    random = Random(case.template)
    for _ in range(tries(NUM_TURNS)):
        turn = random_turn(case, random)
        text, prompt = rendered(template, case, turn)
        sample = Sample(
            text=text,
            tools=tools,
            reasoning=reasoning,
            special=case.special,
            schemas=SCHEMAS,
            reasoning_is_open=bool(reasoning) and prompt.rstrip().endswith(REASONING_FORMATS[reasoning].start),
        )
        found = seen(parse(sample, cut(tokens(sample), random, 8)))
        assert [call.name for call in found.calls] == [call["function"]["name"] for call in turn["tool_calls"]], text
        for call, sent in zip(found.calls, turn["tool_calls"], strict=True):
            assert json.loads(call.arguments) == sent["function"]["arguments"], text
            assert call.is_complete
            assert call.id == sent["id"] or not case.has_ids
        content, reasons = turn["content"], turn.get("reasoning_content", "")
        if case.content_is_reasoning:
            content, reasons = "", f"{reasons}\n\n{content}"
        assert found.content.strip() == content.strip(), text
        assert found.reasons.strip() == reasons.strip(), text


def rendered(template: ChatTemplate, case: Case, turn: dict[str, Any]) -> tuple[str, str]:
    """The text that the model would have written, and its prompt."""
    question = [{"role": "user", "content": "Well?"}]
    tools = [{"function": {"name": name, "description": "", "parameters": one}} for name, one in SCHEMAS.items()]
    tools = tools if case.needs_tools else []
    prompt = template.render(question, tools=tools, options=case.options)
    whole = template.render([*question, turn], tools=tools, options={**case.options, "add_generation_prompt": False})
    if not whole.startswith(prompt):  # a prompt that opens or closes the reasoning, and a turn without any
        prompt = re.sub(r"(<think>\s*)?(</think>\s*)?$", "", prompt)
    assert whole.startswith(prompt), (prompt[-200:], whole[len(prompt) - 100 :])
    text = whole[len(prompt) :].removeprefix("</think>")
    assert case.end in text, text
    text = text.rpartition(case.end)[0] if case.end else text
    return text.replace(case.between_calls, "") if case.between_calls else text, prompt


def random_turn(case: Case, random: Random) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    if case.has_content:
        turn["content"] = random.choice(("", "Let me look.", "Zwei Dinge: 1 < 2, {a}."))
    if case.has_reasoning:
        turn["reasoning_content"] = random.choice(("Which city?", "Hm.\n\n<tool> or [none]?"))
    calls = random_calls(random, max_calls=case.max_calls, types=case.types, without=case.without)
    turn["tool_calls"] = [
        {
            "id": case.ids.format(name=name, number=index),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    return turn
