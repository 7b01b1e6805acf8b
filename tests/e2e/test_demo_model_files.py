"""The bundled demo model: its files, size and chat template, and that it answers a few prompts.

Only transformers is used here; that the engine gives the same tokens is shown by the engine's parity tests.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "model_repository" / "demo"
VERSION = MODEL / "1"
LIMIT_BYTES = 12_000_000


@cache
def loaded() -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(VERSION)
    model = AutoModelForCausalLM.from_pretrained(VERSION, dtype=torch.float32).eval()
    return tokenizer, model


def answer(*texts: str, system: str = "", tools: list[dict[str, Any]] | None = None) -> str:
    """The greedy answer to alternating user and assistant turns; fails if the model does not end its turn."""
    tokenizer, model = loaded()
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]
    inputs = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=120, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert new[-1] == tokenizer.eos_token_id
    return str(tokenizer.decode(new[:-1]))


def test_files_are_complete_and_small() -> None:
    names = {path.name for path in VERSION.iterdir()}
    assert names >= {"config.json", "generation_config.json", "model.safetensors"}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert sum(path.stat().st_size for path in VERSION.iterdir()) <= LIMIT_BYTES


def test_configuration_names_the_model_and_the_backend() -> None:
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    config = text_format.Parse((MODEL / "config.pbtxt").read_text(encoding="utf-8"), ModelConfig())
    assert (config.name, config.backend) == ("demo", "llm")
    assert config.instance_group[0].kind == config.instance_group[0].KIND_CPU


def test_checkpoint_is_a_bfloat16_llama() -> None:
    config = json.loads((VERSION / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(VERSION / "model.safetensors", framework="pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    tokenizer, model = loaded()
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer)


def test_special_tokens_and_ends_of_sequence() -> None:
    tokenizer, model = loaded()
    turn_end, text_end = (tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>"))
    assert model.generation_config.eos_token_id == [turn_end, text_end]
    assert tokenizer.eos_token_id == turn_end
    ids = tokenizer.encode("<|im_start|>a <tool_call>b</tool_call><|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a <tool_call>b</tool_call>"


@pytest.mark.parametrize("text", ["plain", "  two  spaces\n\n", "naïve café", "日本語 🙂", "a\tb\r\n", "1234567"])
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer, _ = loaded()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_template_renders_a_conversation_with_tools() -> None:
    tokenizer, _ = loaded()
    call = {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Bonn"}}}
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_time", "description": "The time", "parameters": schema}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Time in "}, {"type": "text", "text": "Bonn?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "9:30"},
        {"role": "tool", "content": "9:31"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    head, _, tail = text.partition("<|im_start|>user\n")
    assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n") and '"name": "get_time"' in head
    once = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Bonn"}}\n</tool_call>'
    assert tail == (
        f"Time in Bonn?<|im_end|>\n<|im_start|>assistant\n{once}\n{once}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n9:30\n</tool_response>\n<tool_response>\n9:31\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_given_as_text_render_like_an_object() -> None:
    tokenizer, _ = loaded()

    def text(arguments: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    assert text({"a": 1}) == text('{"a": 1}')


def test_training_text_is_rendered_as_the_checkpoint_renders_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from demo_corpus import corpus
    from demo_corpus.dialogue import Dialogue
    from demo_corpus.source import Source

    tokenizer, _ = loaded()
    for seed in range(60):
        sample = corpus.draw(Source(str(seed)))
        if isinstance(sample, Dialogue):
            rendered = tokenizer.apply_chat_template(
                list(sample.messages), tools=list(sample.tools) or None, tokenize=False
            )
            assert corpus.render(sample) == rendered
            learned = [text for text, learn in corpus.segments(sample) if learn]
            assert len(learned) == sum(message["role"] == "assistant" for message in sample.messages)


@pytest.mark.parametrize(
    ("question", "part"),
    [
        ("Hello!", "help you"),
        ("Who are you?", "demo model"),
        ("What is continuous batching?", "batch at every step"),
        ("how do i start the server", "make serve"),
        ("What happens when an engine dies?", "every stream goes on"),
        ("What happens to my request when an engine dies?", "every stream goes on"),
        ("What happens when a client disconnects?", "cancelled"),
        ("What is the capital of France?", "Paris"),
        ("How old is the king of Norway?", "don't know"),
    ],
)
def test_it_answers_questions(question: str, part: str) -> None:
    assert part in answer(question)


@pytest.mark.parametrize(
    ("task", "result"),
    [
        ("Count from 1 to 10", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
        ("Repeat after me: the quick cat sleeps", "the quick cat sleeps"),
        ("Make a JSON object with name Anna and age 31", '{"name": "Anna", "age": 31}'),
    ],
)
def test_it_does_small_tasks(task: str, result: str) -> None:
    """Rare words and sums are beyond these weights (see the README beside them)."""
    assert answer(task) == result


def test_it_remembers_what_was_said() -> None:
    assert "Clara" in answer("Hi, my name is Clara.", "Nice to meet you, Clara!", "What is my name?")


def test_it_calls_a_tool() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"name": "get_weather", "description": "Get the weather of a city", "parameters": schema}
    text = answer("What is the weather in Paris?", tools=[{"type": "function", "function": tool}])
    body = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(body) == {"name": "get_weather", "arguments": {"city": "Paris"}}
