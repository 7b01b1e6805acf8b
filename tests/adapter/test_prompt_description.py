"""The input `prompt_only`: what a prompt is, told without a generation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from typing import Any

import pytest

from llmbackend.adapter.requests.prompts import MAX_DESCRIBED_TOKENS
from llmbackend.adapter.schemas.prompt_description import DESCRIPTION_OUTPUTS, described
from llmbackend.adapter.schemas.schema import LlmInputs, OutputOptions, Prompt
from llmbackend.adapter.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from llmbackend.core.backend_api import ErrorCode
from tests.helpers.llm_host import Call, LlmHost, llm_host
from tests.helpers.tokenizers_for_tests import byte_level_tokenizer

OF_PROMPT = DESCRIPTION_OUTPUTS - {"sampling_parameters"}
ALL = {f"return_{name}": True for name in OF_PROMPT}
HI = json.dumps([{"role": "user", "content": "hi"}])
RENDERED = "user: hi\nassistant: "


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmHost]:
    with llm_host(tmp_path_factory.mktemp("repository")) as one:
        yield one


def describe(host: LlmHost, **inputs: Any) -> Call:
    return host.infer(prompt_only=True, **inputs)


def asking(outputs: Set[str]) -> LlmInputs:
    return LlmInputs(OutputOptions(False, False, frozenset(outputs)), {}, prompt_only=True)


def refusal(call: Call) -> str:
    assert call.error is not None and call.error.code is ErrorCode.INVALID_ARG
    return call.error.message


def test_a_conversation_is_described_as_it_would_be_generated_from(host: LlmHost) -> None:
    call = describe(host, messages=HI, **ALL)
    assert call.all("prompt_text") == [RENDERED.encode()]
    assert call.all("prompt_token_ids") == list(RENDERED.encode())
    assert json.loads(call.all("prompt_tokens")[0]) == list(RENDERED)
    assert call.all("num_input_tokens") == [len(RENDERED)] and call.all("max_model_len") == [256]
    assert call.output_names == [OF_PROMPT], "one response, and nothing beside what was asked for"
    generated = host.infer(messages=HI, return_prompt_token_ids=True, sampling={"max_tokens": 1})
    assert generated.all("prompt_token_ids") == call.all("prompt_token_ids")


def test_only_what_was_asked_for_comes(host: LlmHost) -> None:
    assert describe(host, text_input="abc", return_num_input_tokens=True).output_names == [{"num_input_tokens"}]
    assert describe(host, text_input="abc").output_names == [set()]


def test_token_ids_become_text_with_their_special_tokens(host: LlmHost) -> None:
    ids = [ByteTokenizer.BOS, *"é".encode(), ByteTokenizer.EOS]
    assert describe(host, input_ids=ids, return_prompt_text=True).all("prompt_text") == ["<bos>é<eos>".encode()]
    assert "holds 100000, expected token ids from 0" in refusal(describe(host, input_ids=[1, 100_000]))


@pytest.mark.parametrize("prompt", [{"text_input": ""}, {"input_ids": []}], ids=str)
def test_nothing_is_a_prompt_of_no_tokens(host: LlmHost, prompt: dict[str, Any]) -> None:
    call = describe(host, **prompt, **ALL)
    assert (call.all("prompt_token_ids"), call.all("num_input_tokens")) == ([], [0])
    assert call.all("prompt_tokens") == [b"[]"] and call.all("prompt_text") == [b""]


def test_a_prompt_may_be_longer_than_the_context(host: LlmHost) -> None:
    text = "x" * 20_000  # of 256 tokens, and by a conversion thread
    assert describe(host, text_input=text, return_num_input_tokens=True).all("num_input_tokens") == [20_000]
    assert describe(host, input_ids=[7] * 300, return_num_input_tokens=True).all("num_input_tokens") == [300]
    messages = json.dumps([{"role": "user", "content": ""}] * 300)
    assert describe(host, messages=messages, return_num_input_tokens=True).all("num_input_tokens") == [300 * 7 + 11]
    assert "the prompt has 20000 characters" in refusal(host.infer(text_input=text))


def test_even_so_it_is_bounded(host: LlmHost) -> None:
    assert refusal(describe(host, text_input="x" * (MAX_DESCRIBED_TOKENS + 1))) == (
        f"the prompt has {MAX_DESCRIBED_TOKENS + 1} tokens, expected at most {MAX_DESCRIBED_TOKENS}: "
        "longer texts are not tokenised"
    )
    assert "characters, expected at most 4194304" in refusal(describe(host, text_input="x" * (4 << 20) + "x"))
    assert "1048577 tokens" in refusal(describe(host, input_ids=[1] * (MAX_DESCRIBED_TOKENS + 1)))


def test_outputs_of_a_generation_and_of_a_description_do_not_mix(host: LlmHost) -> None:
    assert refusal(describe(host, text_input="a", return_output_ids=True)) == (
        "'return_output_ids' is true, but 'prompt_only' generates nothing"
    )
    assert "expected 'prompt_only' to be true with it" in refusal(host.infer(text_input="a", return_max_model_len=True))


def test_a_request_is_checked_as_a_generation_where_its_parameters_are_asked_for(host: LlmHost) -> None:
    asked = {"text_input": "abc", "return_sampling_parameters": True}
    call = describe(host, **asked, sampling={"max_tokens": 1000, "top_k": 3, "bad_words": ["no"], "seed": -1})
    found = json.loads(call.all("sampling_parameters")[0])
    assert (found["max_tokens"], found["top_k"], found["seed"]) == (253, 3, None)
    assert found["bad_words"] == ["no"] and found["temperature"] == 1.0
    for inputs, told in (
        ({"text_input": "x" * 256}, "the prompt has 256 tokens"),
        ({"text_input": ""}, "the prompt is empty"),
        ({"sampling": {"top_k": -2}}, "'top_k' is -2"),
        ({"sampling": {"lora_name": "a"}}, "LoRA feature is not enabled."),
    ):
        assert told in refusal(describe(host, **{**asked, **inputs}))


def test_parameters_that_are_not_text_are_refused(host: LlmHost) -> None:
    schema = {"type": "object", "description": "\ud800"}
    sampling = {"structured_outputs": {"json": schema}}
    call = describe(host, text_input="abc", return_sampling_parameters=True, sampling=sampling)
    assert "'structured_outputs' holds half of a surrogate pair" in refusal(call)


def test_no_engine_sees_the_request(host: LlmHost) -> None:
    before = host.metric("vllm:prompt_tokens_total")
    describe(host, text_input="abc", return_num_input_tokens=True)
    assert host.metric("vllm:prompt_tokens_total") == before is not None
    assert host.infer(text_input="abc").error is None
    assert host.metric("vllm:prompt_tokens_total") == before + 3, "as an engine's request does"


def test_tokens_have_the_names_of_the_vocabulary() -> None:
    tokenizer = HuggingFaceTokenizer(byte_level_tokenizer())
    ids = tuple(tokenizer.encode("Hello world", add_special_tokens=False))
    tensors = described(Prompt("Hello world", ids), asking({"prompt_tokens"}), tokenizer, 8)
    names = json.loads(tensors[0].data.item())
    assert "".join(names) == "HelloĠworld" and [tokenizer.token_id(name) for name in names] == list(ids)


def test_long_prompts_are_whole() -> None:
    ids = tuple(index % 256 for index in range(30_000))
    outputs = described(Prompt("", ids), asking(DESCRIPTION_OUTPUTS), ByteTokenizer(), 8)
    found = {tensor.name: tensor.data for tensor in outputs}
    assert found["prompt_token_ids"].tolist() == list(ids)
    assert len(json.loads(found["prompt_tokens"].item())) == 30_000
