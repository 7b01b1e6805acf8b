"""/tokenize and /detokenize over the bundled model, compared with its tokenizer and with what chats count."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from tests.helpers.openai_live_server import serve_openai

pytestmark = pytest.mark.slow

CHECKPOINT = Path(__file__).parents[2] / "model_repository" / "demo" / "1"
MODEL = "demo"
MAX_BODY_BYTES = 1 << 20
USER: list[dict[str, Any]] = [{"role": "user", "content": "Where is the käse?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def reference() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    repository = tmp_path_factory.mktemp("repository")
    for name, arguments in (
        (MODEL, {"model": str(CHECKPOINT), "num_kv_blocks": 64, "num_threads": 1, "max_model_len": 256}),
        ("strict", {"model": "mock"}),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text('backend: "llm"\ninstance_group [{ count: 1 kind: KIND_CPU }]')
        (repository / name / "1" / "model.json").write_text(json.dumps({"transport": "inline", **arguments}))
    server = InferenceServer(ServerOptions(model_repositories=(repository,)))
    server.start()
    with serve_openai(server, max_body_bytes=MAX_BODY_BYTES) as base:
        yield base
    assert server.stop(timeout_s=20)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(url: str, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(url + path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    fields: dict[str, Any] = answer.json()
    return fields


def refused(url: str, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = httpx.post(url + path, json=body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_a_text_becomes_tokens_and_text_again(url: str, reference: Tokenizer) -> None:
    for text in ("Once upon a time", "käse 🧀 \n", "<|im_start|>user"):
        expected = reference.encode(text)
        answer = ask(url, "/tokenize", prompt=text, return_token_strs=True)
        assert answer == {
            "count": len(expected.ids),
            "max_model_len": 256,
            "tokens": expected.ids,
            "token_strs": expected.tokens,
        }
        assert ask(url, "/tokenize", prompt=text) == answer | {"token_strs": None}
        assert ask(url, "/detokenize", tokens=expected.ids) == {"prompt": text}
    assert ask(url, "/tokenize", prompt="") == {"count": 0, "max_model_len": 256, "tokens": [], "token_strs": None}
    assert ask(url, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": TOOLS},
        {"add_generation_prompt": False},
        {"messages": [*USER, {"role": "assistant", "content": "It is in"}], "continue_final_message": True},
        {"add_special_tokens": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
def test_a_conversation_has_the_tokens_that_a_chat_has(url: str, fields: dict[str, Any]) -> None:
    messages = fields.get("messages", USER)
    answer = ask(url, "/tokenize", **{"messages": messages, **fields})
    chat = ask(url, "/v1/chat/completions", **{"messages": messages, **fields}, max_tokens=1, return_token_ids=True)
    assert answer["tokens"] == chat["prompt_token_ids"]
    assert answer["count"] == chat["usage"]["prompt_tokens"]


def test_a_prompt_may_be_longer_than_the_context(url: str, reference: Tokenizer) -> None:
    text = "word " * 60_000
    expected = reference.encode(text).ids
    answer = ask(url, "/tokenize", prompt=text)
    assert answer["tokens"] == expected and len(expected) > 256
    assert ask(url, "/detokenize", tokens=expected)["prompt"] == text
    chat = ask(url, "/tokenize", messages=[{"role": "user", "content": text}], return_token_strs=True)
    assert chat["count"] == len(chat["tokens"]) == len(chat["token_strs"]) > len(expected)


def test_the_openai_client_can_post_to_it(client: openai.OpenAI) -> None:
    answer: Any = client.post("/tokenize", body={"model": MODEL, "prompt": "abc"}, cast_to=object)
    assert answer["count"] == len(answer["tokens"])
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.post("/tokenize", body={"model": "other", "prompt": "abc"}, cast_to=object)


@pytest.mark.parametrize(
    ("path", "body", "param", "text"),
    [
        ("/tokenize", {"model": MODEL}, "prompt", "missing required field 'prompt'"),
        ("/tokenize", {"model": MODEL, "prompt": 3}, "prompt", "'prompt' is 3, expected a string"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "top_p": 1}, "top_p", "unknown field 'top_p'"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "messages": USER}, "prompt", "unknown field 'prompt'"),
        ("/tokenize", {"model": MODEL, "messages": []}, "messages", "expected a non-empty list"),
        ("/tokenize", {"prompt": "a"}, "model", "missing required field 'model': this server has 2 models"),
        ("/tokenize", {"model": MODEL, "messages": USER, "chat_template": "{{ 1 }}"}, "chat_template", "not trusted"),
        (
            "/tokenize",
            {"model": MODEL, "messages": USER, "mm_processor_kwargs": {"a": 1}},
            "mm_processor_kwargs",
            "text",
        ),
        (
            "/tokenize",
            {"model": MODEL, "messages": USER, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "both true, expected one",
        ),
        ("/detokenize", {"model": MODEL, "tokens": "abc"}, "tokens", "expected a list of token ids"),
        ("/detokenize", {"model": MODEL, "tokens": [-1]}, "tokens", "expected a list of token ids"),
        (
            "/detokenize",
            {"model": MODEL, "tokens": [1, 10**6]},
            "tokens",
            "'tokens' holds 1000000, expected token ids from",
        ),
        (
            "/v1/completions",
            {"model": MODEL, "prompt": [1, 10**6]},
            "prompt",
            "'prompt' holds 1000000, expected token ids from",
        ),
        ("/detokenize", {"model": MODEL}, "tokens", "missing required field 'tokens'"),
    ],
    ids=str,
)
def test_wrong_bodies_are_refused_by_field(url: str, path: str, body: Any, param: str, text: str) -> None:
    error = refused(url, path, body)
    assert error["param"] == param and text in error["message"]


def test_bodies_are_bounded_and_are_json(url: str) -> None:
    assert refused(url, "/tokenize", {"prompt": "a" * MAX_BODY_BYTES}, 413)["code"] == "content_too_large"
    assert httpx.post(f"{url}/tokenize", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert httpx.post(f"{url}/detokenize", content=b"{}").status_code == 415


def test_a_chat_is_rendered_as_an_engine_would_get_it(url: str) -> None:
    chat = {"messages": USER, "tools": TOOLS, "temperature": 0.5, "stop": "x", "seed": 7, "top_logprobs": 2}
    rendered = ask(url, "/v1/chat/completions/render", **chat, logprobs=True, request_id="mine", priority=0)
    answer = ask(url, "/v1/chat/completions", **chat, logprobs=True, max_tokens=1, return_token_ids=True)
    ids = answer["prompt_token_ids"]
    sampling = rendered.pop("sampling_params")
    assert rendered == {
        "request_id": "chatcmpl-mine",
        "token_ids": ids,
        "features": None,
        "model": MODEL,
        "stream": False,
        "stream_options": None,
        "cache_salt": None,
        "priority": 0,
        "kv_transfer_params": None,
    }
    expected = {"temperature": 0.5, "stop": ["x"], "seed": 7, "logprobs": 2, "n": 1, "max_tokens": 256 - len(ids)}
    assert {name: sampling[name] for name in expected} == expected
    assert ask(url, "/v1/chat/completions/render", messages=USER)["sampling_params"]["seed"] is None
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    held = ask(url, "/v1/chat/completions/render", messages=USER, response_format=schema)
    assert held["sampling_params"]["structured_outputs"]["json"] == {"type": "object"}


def test_completions_are_rendered_prompt_by_prompt(url: str, reference: Tokenizer) -> None:
    ids = reference.encode("Once").ids
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    answers = httpx.post(f"{url}/v1/completions/render", json={**body, "prompt": ["Once", "upon"]}).json()
    assert [one["token_ids"] for one in answers] == [ids, reference.encode("upon").ids]
    assert [(one["stream"], one["stream_options"]) for one in answers] == [(True, {"include_usage": True})] * 2
    assert answers[0]["sampling_params"]["max_tokens"] == 16
    (answer,) = httpx.post(f"{url}/v1/completions/render", json={"model": MODEL, "prompt": ids}).json()
    assert answer["token_ids"] == ids


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions/render", {"model": MODEL, "prompt": "word " * 300}, "prompt"),
        ("/v1/chat/completions/render", {"model": MODEL, "messages": USER, "max_tokens": 300}, "max_tokens"),
        ("/v1/chat/completions/render", {"model": MODEL, "messages": USER, "temperature": 3}, "temperature"),
        ("/v1/chat/completions/render", {"model": MODEL, "messages": USER, "logit_bias": {"99999": 1}}, "logit_bias"),
        ("/v1/chat/completions/render", {"model": MODEL, "messages": USER, "priority": 1}, "priority"),
        (
            "/v1/chat/completions/render",
            {"model": MODEL, "messages": USER, "structured_outputs": {"regex": "("}},
            "structured_outputs",
        ),
    ],
    ids=str,
)
def test_what_would_not_be_generated_is_not_rendered(url: str, path: str, body: Any, param: str) -> None:
    error = refused(url, path, body)
    generated = refused(url, path.removesuffix("/render"), body)
    assert error == generated and error["param"] == param
