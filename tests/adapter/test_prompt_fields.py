"""Fields that change what the prompt is, or how tokens are read and banned as text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from llmbackend.adapter.schemas.sampling import parse_sampling_parameter
from llmbackend.adapter.text.chat import PromptBounds, read_chat
from llmbackend.adapter.text.chat_template import request_template
from llmbackend.adapter.text.token_bias import TokenBias, banned_texts
from llmbackend.adapter.text.tokenizer import HuggingFaceTokenizer, byte_of_character
from llmbackend.core.backend_api import ErrorCode, TritonError
from tests.helpers.llm_host import Call, LlmHost, llm_host
from tests.helpers.tokenizers_for_tests import byte_fallback_tokenizer, byte_level_tokenizer

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
LEVELS = "dynamic_batching { priority_levels: 3 default_priority_level: 2 }\n"
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " I was about to "}]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmHost]:
    with llm_host(tmp_path_factory.mktemp("repository"), trust_request_chat_template=True) as one:
        yield one


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmHost]:
    """A host whose tokenizer puts `<s>` before each text."""
    tokenizer, root = byte_level_tokenizer(), tmp_path_factory.mktemp("bos")
    tokenizer.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    with llm_host(root / "repository", tokenizer=str(root), mock_vocab_size=tokenizer.get_vocab_size()) as one:
        yield one


def prompt_ids(host: LlmHost, sampling: dict[str, Any], **prompt: Any) -> list[int]:
    return host.infer(sampling=GREEDY | sampling, return_prompt_token_ids=True, **prompt).all("prompt_token_ids")


def error_of(call: Call) -> str:
    assert call.error is not None and call.error.code is ErrorCode.INVALID_ARG
    return call.error.message


def chat(messages: list[dict[str, Any]], **fields: Any) -> str:
    return json.dumps({"messages": messages, **fields})


def test_prompts_are_cut_on_the_left(host: LlmHost) -> None:
    text = "the end is what stays"
    assert prompt_ids(host, {"truncate_prompt_tokens": 5}, text_input=text) == list(b"stays")
    assert prompt_ids(host, {"truncate_prompt_tokens": 100}, text_input=text) == list(text.encode())
    assert prompt_ids(host, {"truncate_prompt_tokens": 2}, input_ids=[5, 6, 7]) == [6, 7]
    right = {"truncate_prompt_tokens": 2, "truncation_side": "right"}
    assert prompt_ids(host, right, input_ids=[5, 6, 7]) == [5, 6]
    assert prompt_ids(host, right, text_input=text) == list(text[:2].encode())
    assert prompt_ids(host, {"truncate_prompt_tokens": 11}, messages=chat(MESSAGES[:1])) == list(b"assistant: ")
    cut = host.infer(text_input=text, sampling=GREEDY | {"truncate_prompt_tokens": 5}, exclude_input_in_output=True)
    assert cut.text == host.infer(text_input="stays", sampling=GREEDY, exclude_input_in_output=True).text


def test_a_prompt_beyond_the_context_is_cut_to_what_has_room(host: LlmHost) -> None:
    text = "x" * 200 + "y" * 56
    assert "the prompt has 256 tokens" in error_of(host.infer(text_input=text, sampling=GREEDY))
    assert len(prompt_ids(host, {"truncate_prompt_tokens": -1}, text_input=text)) == 252  # 4 may follow
    assert len(prompt_ids(host, {"truncate_prompt_tokens": 255}, text_input=text)) == 255
    assert len(prompt_ids(host, {"truncate_prompt_tokens": -1}, input_ids=[1] * 1000)) == 252


@pytest.mark.parametrize(
    ("arguments", "num_reserved"),
    [
        ({}, 64),
        ({"max_model_len": 32768, "num_kv_blocks": 4096}, 4096),
        ({"override_generation_config": {"max_new_tokens": 100}}, 100),
    ],
)
def test_a_cut_prompt_leaves_room_for_an_answer_without_limit(
    tmp_path: Path, arguments: dict[str, Any], num_reserved: int
) -> None:
    """A quarter of the context, at most 4,096 tokens, unless the model has a limit."""
    context = arguments.get("max_model_len", 256)
    with llm_host(tmp_path, **arguments) as host:
        asked = {"truncate_prompt_tokens": -1, "max_tokens": None}
        ids = host.infer(
            text_input="x" * (context + 9),
            sampling=asked,
            prompt_only=True,
            exclude_input_in_output=True,
            return_prompt_token_ids=True,
        ).all("prompt_token_ids")
    assert len(ids) == context - num_reserved


def test_the_text_of_a_cut_prompt_is_that_of_its_tokens(host: LlmHost) -> None:
    text = "the end is what stays"
    flags = {"exclude_input_in_output": True, "return_prompt_text": True}
    for keep, kept in ((5, "stays"), (100, text)):
        call = host.infer(text_input=text, sampling=GREEDY | {"truncate_prompt_tokens": keep}, **flags)
        assert call.all("prompt_text") == [kept.encode()]


def test_a_text_of_more_characters_than_the_context_could_have_is_cut_as_well(host: LlmHost) -> None:
    text = "x" * 20_000 + "the end"
    assert prompt_ids(host, {"truncate_prompt_tokens": 7}, text_input=text) == list(b"the end")
    messages = [*MESSAGES[:1] * 300, {"role": "user", "content": text}]
    assert prompt_ids(host, {"truncate_prompt_tokens": 11}, messages=chat(messages)) == list(b"assistant: ")
    too_long = host.infer(text_input="x" * ((4 << 20) + 1), sampling={"truncate_prompt_tokens": 7})
    assert "characters, expected at most 4194304" in error_of(too_long)


@pytest.mark.parametrize(("value", "expected"), [(0, "at least 1, or -1"), (-2, "at least -1"), (256, "at most 255")])
def test_truncations_that_cannot_be(host: LlmHost, value: int, expected: str) -> None:
    message = error_of(host.infer(text_input="a", sampling={"truncate_prompt_tokens": value}))
    assert f"'truncate_prompt_tokens' is {value}, expected" in message and expected in message


def test_special_tokens_of_the_tokenizer(with_bos: LlmHost) -> None:
    bare = prompt_ids(with_bos, {"add_special_tokens": False}, text_input="Hello")
    assert prompt_ids(with_bos, {}, text_input="Hello") == [0, *bare]
    assert prompt_ids(with_bos, {"add_special_tokens": True}, text_input="Hello") == [0, *bare]
    messages = chat([{"role": "user", "content": "Hello"}])
    assert prompt_ids(with_bos, {}, messages=messages) == bare
    assert prompt_ids(with_bos, {"add_special_tokens": True}, messages=messages) == [0, *bare]


def test_bad_words_do_not_come(host: LlmHost) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    text = host.infer(text_input="say", sampling=asked, exclude_input_in_output=True).text
    words = [text[10:13], text[30]]
    banned = host.infer(text_input="say", sampling=asked | {"bad_words": words}, exclude_input_in_output=True).text
    assert text[:10] == banned[:10] and not any(word in banned for word in words)
    for bad in ([""], "x", [1]):
        assert "'bad_words'" in error_of(host.infer(text_input="a", sampling={"bad_words": bad}))


def test_bad_words_also_behind_a_space() -> None:
    tokenizer = HuggingFaceTokenizer(byte_level_tokenizer())
    found = banned_texts(["fox", "世"], tokenizer)
    spaced = tokenizer.encode(" fox", add_special_tokens=False)
    bare = tokenizer.encode("fox", add_special_tokens=False)
    assert found[0] == tuple(bare)
    assert (tuple(spaced) in found) == (len(spaced) == len(bare) and spaced[0] != bare[0])
    assert tuple(tokenizer.encode("世", add_special_tokens=False)) in found


def test_the_limit_of_bad_words_counts_a_word_once_although_it_is_banned_in_two_forms() -> None:
    vocabulary = byte_of_character() | {"Ġa": 256}
    inner = Tokenizer(models.BPE(vocabulary, merges=[("Ġ", "a")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = HuggingFaceTokenizer(inner)
    words = parse_sampling_parameter("bad_words", [f"a{number}" for number in range(256)])
    found = banned_texts(words, tokenizer)
    assert len(found) == 512
    assert TokenBias(bad_ids=found).resolve(tokenizer, 257) == ({}, tuple(found))


def test_spaces_between_special_tokens() -> None:
    inner = byte_fallback_tokenizer()
    tokenizer = HuggingFaceTokenizer(inner)
    vocabulary = inner.get_vocab()
    tokens = [vocabulary["▁hello"], 1, 1, 2, vocabulary["▁world"]]

    def text(spaces: bool, skip: bool = False) -> str:
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        return "".join([*map(detokenizer.push, tokens), detokenizer.flush()])

    assert text(spaces=False).count("<s><s></s>") == 1
    assert text(spaces=True) == tokenizer._decode_all(tokens)
    assert text(spaces=False, skip=True) == text(spaces=True, skip=True)


def test_the_final_message_is_continued(host: LlmHost) -> None:
    ids = prompt_ids(host, {}, messages=chat(MESSAGES, continue_final_message=True))
    assert bytes(ids).decode() == "user: hi\nassistant:  I was about to "
    trimming = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    ids = prompt_ids(host, {}, messages=chat(MESSAGES, continue_final_message=True, chat_template=trimming))
    assert bytes(ids).decode() == "[user]hi[end][assistant]I was about to"
    both = chat(MESSAGES, continue_final_message=True, add_generation_prompt=True)
    assert "both true" in error_of(host.infer(messages=both, sampling=GREEDY))
    nothing = chat([*MESSAGES[:1], {"role": "assistant", "content": " "}], continue_final_message=True)
    assert "the last message has no text" in error_of(host.infer(messages=nothing, sampling=GREEDY))


@pytest.mark.parametrize("text", ["d", "<|", "m_end|>"])
@pytest.mark.parametrize("as_parts", [False, True])
def test_a_continued_text_may_occur_in_what_follows_it(host: LlmHost, text: str, as_parts: bool) -> None:
    chatml = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    content: Any = [{"type": "text", "text": text}] if as_parts else text
    messages = [MESSAGES[0], {"role": "assistant", "content": content}]
    ids = prompt_ids(host, {}, messages=chat(messages, continue_final_message=True, chat_template=chatml))
    assert bytes(ids).decode() == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{text}"


def test_a_text_that_the_template_drops_cannot_be_continued(host: LlmHost) -> None:
    dropping = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}I was about to"
    call = host.infer(messages=chat(MESSAGES, continue_final_message=True, chat_template=dropping), sampling=GREEDY)
    assert "the chat template leaves its text out" in error_of(call)


def test_a_template_of_the_request(host: LlmHost, with_bos: LlmHost) -> None:
    own = chat(MESSAGES[:1], chat_template="<{{ messages[0].content }}|{{ x }}>", chat_template_kwargs={"x": 3})
    assert bytes(prompt_ids(host, {}, messages=own)).decode() == "<hi|3>"
    assert "--trust-request-chat-template" in error_of(with_bos.infer(messages=own, sampling=GREEDY))
    broken = chat(MESSAGES, chat_template="{{ messages")
    assert "the chat template does not compile" in error_of(host.infer(messages=broken, sampling=GREEDY))
    escaping = chat(MESSAGES, chat_template="{{ messages.__class__.__mro__ }}")
    assert "refuses 'messages'" in error_of(host.infer(messages=escaping, sampling=GREEDY))
    long = chat(MESSAGES, chat_template="x" * 65537)
    assert "'chat_template' has 65537 characters" in error_of(host.infer(messages=long, sampling=GREEDY))


def test_own_templates_read_documents_and_special_tokens() -> None:
    text = chat(
        MESSAGES[:1], documents=[{"title": "t", "text": "body"}], chat_template="{{ documents[0].text }}{{ bos }}"
    )
    found = read_chat(text.encode(), PromptBounds(100, 1000, 100, "", trusts_templates=True))
    template = request_template(found.template, (("bos", "<s>"),))
    assert template.render(found.messages, options=found.options) == "body<s>"
    with pytest.raises(TritonError, match="documents"):
        request_template("{{ messages }}").render(found.messages, options=found.options)


def test_priority_is_a_level_of_the_model(tmp_path: Path, host: LlmHost) -> None:
    assert "has no priority_levels" in error_of(host.infer(text_input="a", sampling={"priority": 1}))
    assert host.infer(text_input="a", sampling={"priority": 0, "max_tokens": 1}).error is None
    slow: dict[str, Any] = {"mock_step_ms": 3, "max_num_seqs": 1}
    with llm_host(tmp_path, pbtxt=LEVELS, **slow) as levels:
        order: list[int] = []
        busy = levels.start(text_input="a", stream=True, sampling=GREEDY | {"max_tokens": 60})
        assert busy.first.wait(20)
        calls = [
            levels.start(text_input="b", sampling=GREEDY | {"priority": level}, on_final=partial(order.append, level))
            for level in (3, 0, 1)
        ]
        for call in (busy, *calls):
            call.wait()
        assert order == [1, 0, 3]
        assert "expected 1 (first) to 3, or 0" in error_of(levels.infer(text_input="a", sampling={"priority": 4}))


@pytest.mark.parametrize("name", ["extra_args", "use_beam_search", "logits_processors", "detokenize"])
def test_what_nothing_takes_is_refused_by_name(host: LlmHost, name: str) -> None:
    call = host.infer(text_input="a", sampling={name: {"a": 1}})
    assert call.error is not None and call.error.code is ErrorCode.UNSUPPORTED
    assert f"'{name}' is not supported" in call.error.message
