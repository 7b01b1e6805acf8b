"""A model's text: which files are read, chat templates, special tokens."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from llmbackend.adapter.text.chat_template import ChatTemplate
from llmbackend.adapter.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, TooManyTokensError
from llmbackend.core.backend_api import ErrorCode, TritonError
from tests.helpers.tokenizers_for_tests import byte_fallback_tokenizer, byte_level_tokenizer, load_tokenizer

CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi"}]


def checkpoint(directory: Path, **config: Any) -> Path:
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_text_input_gets_special_tokens_and_a_templates_text_does_not(tmp_path: Path) -> None:
    text = load_tokenizer(str(checkpoint(tmp_path, bos_token={"content": "<s>"}, chat_template=CHATML)))
    assert text.encode("hi", add_special_tokens=True)[0] == 0
    rendered = text.render_chat(MESSAGES, None, {})
    assert rendered == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text.encode(rendered, add_special_tokens=False).count(0) == 1


def test_add_generation_prompt_and_other_options_reach_the_template() -> None:
    template = ChatTemplate(CHATML + "{{ mood }}", {})
    rendered = template.render(MESSAGES, options={"add_generation_prompt": False, "mood": "glad"})
    assert rendered.endswith("<|im_end|>\nglad")


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_where_a_chat_template_is_looked_for(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, chat_template=[{"name": "default", "template": "from the config"}])
    if name == "chat_template.jinja":
        (tmp_path / name).write_text("from the jinja file")
    if name == "chat_template.json":
        (tmp_path / name).write_text(json.dumps({"chat_template": "from the json file"}))
    expected = {"jinja": "from the jinja file", "json": "from the json file"}
    suffix = "config" if name == "tokenizer_config.json" else name.split(".")[1]
    assert load_tokenizer(str(tmp_path)).render_chat(MESSAGES, None, {}) == expected.get(suffix, "from the config")


@pytest.mark.parametrize("place", ["list in the config", "files"])
def test_conversations_with_tools_have_their_own_template(tmp_path: Path, place: str) -> None:
    """White space at the ends of both templates stays as it is in each alone."""
    texts = {"default": "\n plain {% if x %}{% endif %} \n", "tool_use": "\n{{ tools[0] }} \n"}
    if place == "files":
        checkpoint(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(texts["default"])
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
    else:
        named = [{"name": name, "template": text} for name, text in texts.items()]
        others = [{"name": "rag", "template": "{{ documents }}"}, {"name": "broken"}, 1]
        checkpoint(tmp_path, chat_template=[*named, *others])
    tokenizer = load_tokenizer(str(tmp_path))
    plain, with_tools = (ChatTemplate(text, {}) for text in (texts["default"], texts["tool_use"]))
    assert tokenizer.render_chat(MESSAGES, None, {}) == plain.render(MESSAGES)
    assert tokenizer.render_chat(MESSAGES, ["t"], {}) == with_tools.render(MESSAGES, tools=["t"]) == "\nt "


def test_special_tokens_map_fills_what_the_config_leaves_out(tmp_path: Path) -> None:
    checkpoint(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}", bos_token="<B>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "no", "eos_token": {"content": "<E>"}}))
    assert load_tokenizer(str(tmp_path)).render_chat(MESSAGES, None, {}) == "<B><E>"


def test_a_model_without_a_chat_template_refuses_messages(tmp_path: Path) -> None:
    with pytest.raises(TritonError, match="no chat template: name one with --chat-template"):
        load_tokenizer(str(checkpoint(tmp_path))).render_chat(MESSAGES, None, {})


def test_template_environment_is_hugging_faces() -> None:
    source = (
        "{%- for message in messages -%}\n"
        "    {% if loop.index0 > 0 %}{% break %}{% endif %}\n"
        "    {% generation %}{{ message.content }}{% endgeneration %}\n"
        "{%- endfor %}{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') | length }}"
    )
    assert ChatTemplate(source, {}).render([*MESSAGES, *MESSAGES]).replace("\n", "").strip() == 'hi{"a": "<é>"}4'


def test_tools_and_tool_calls_reach_the_template_as_objects() -> None:
    source = "{{ tools[0].name }}{% for m in messages %}{{ m.tool_calls[0].function.arguments.city }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(source, {}).render(messages, tools=[{"name": "weather"}]) == "weatherBonn"


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ByteTokenizer().render_chat([{"role": "user", "content": parts}], None, {}) == "user: a\nb\nassistant: "


@pytest.mark.parametrize(
    ("message", "expected", "code"),
    [
        ("hi", "'messages[0]' must be an object with a string 'role'", ErrorCode.INVALID_ARG),
        ({"content": "hi"}, "'messages[0]' must be an object with a string 'role'", ErrorCode.INVALID_ARG),
        ({"role": "user", "content": 3}, "'messages[0].content' must be", ErrorCode.INVALID_ARG),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only 'text' is supported", ErrorCode.UNSUPPORTED),
        ({"role": "a", "content": "", "tool_calls": [{}]}, "'messages[0].tool_calls'", ErrorCode.INVALID_ARG),
    ],
)
def test_malformed_messages_are_refused(message: Any, expected: str, code: ErrorCode) -> None:
    with pytest.raises(TritonError) as caught:
        ByteTokenizer().render_chat([message], None, {})
    assert expected in caught.value.message
    assert caught.value.code is code


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ missing.name }}",
    ],
)
def test_what_a_template_cannot_do_is_the_requests_error(source: str) -> None:
    with pytest.raises(TritonError, match="chat template refuses 'messages'") as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_a_template_that_does_not_compile_is_a_load_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not compile"):
        load_tokenizer(str(checkpoint(tmp_path, chat_template="{% for %}")))


def test_broken_files_are_load_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json.*not JSON"):
        load_tokenizer(str(tmp_path))


def test_the_mock_models_text_is_bytes() -> None:
    text = load_tokenizer("mock")
    assert text.encode("hé", add_special_tokens=True) == [0x68, 0xC3, 0xA9]
    assert text.decode([0x68, 257, 0xC3, 0xA9, 999]) == "hé"
    assert [text.token_text(one) for one in (0x68, 0xC3, 257)] == ["h", "\ufffd", "<eos>"]


def test_a_long_text_is_tokenised_without_the_interpreters_lock(tmp_path: Path) -> None:
    text = load_tokenizer(str(checkpoint(tmp_path)))
    done = threading.Event()
    turns = 0

    def count() -> None:
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    counting = threading.Thread(target=count)
    counting.start()
    ids = text.encode("hello world " * 50_000, add_special_tokens=False)
    before_end = turns
    done.set()
    counting.join()
    assert before_end > 10
    assert ids == text.encode("hello world ", add_special_tokens=False) * 50_000


def test_a_text_of_too_many_tokens_is_told_by_their_number(tmp_path: Path) -> None:
    for text in (load_tokenizer(str(checkpoint(tmp_path))), load_tokenizer("mock")):
        num_tokens = len(text.encode("hello " * 2000, add_special_tokens=False))
        assert len(text.encode("hello " * 2000, add_special_tokens=False, below=num_tokens + 1)) == num_tokens
        with pytest.raises(TooManyTokensError) as caught:
            text.encode("hello " * 2000, add_special_tokens=False, below=num_tokens)
        assert caught.value.num_tokens == num_tokens


def test_the_bytes_of_a_token_that_is_part_of_a_character() -> None:
    weather = "é🌦"
    tokenizers = (
        ByteTokenizer(),
        HuggingFaceTokenizer(byte_level_tokenizer()),
        HuggingFaceTokenizer(byte_fallback_tokenizer()),
    )
    for tokenizer in tokenizers:
        tokens = tokenizer.encode(weather, add_special_tokens=False)
        parts = [tokenizer.partial_bytes(one) for one in tokens]
        found = [
            tokenizer.token_text(one).encode() if part is None else part
            for one, part in zip(tokens, parts, strict=True)
        ]
        assert b"".join(found).decode().strip() == weather and len([one for one in parts if one]) >= 3
        plain = tokenizer.encode("hello", add_special_tokens=False)
        assert [tokenizer.partial_bytes(one) for one in plain] == [None] * len(plain)


def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"'tokenizer\.json' is not a regular file"):
        load_tokenizer(str(tmp_path), interpreter="/nowhere/python")
