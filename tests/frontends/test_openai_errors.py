"""What is refused, and how: status, OpenAI-shaped body, the field's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import orjson
import pytest

from llmbackend.cli.flags.endpoints import HttpFlags
from llmbackend.core.errors import TritonError
from llmbackend.frontends.context import DEFAULT_MAX_BODY_BYTES
from llmbackend.frontends.generation.inferences import Generation
from llmbackend.frontends.openai.endpoints import MAX_OBJECTS, json_object
from tests.helpers.fake_llm_server import FAILED, MODEL, REASON, FakeLlmServer
from tests.helpers.openai_live_server import serve_openai

USER_HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": USER_HI}
COMPLETION = {"model": MODEL, "prompt": "hi"}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    headers = {"content-type": "application/json"}
    with (
        serve_openai(FakeLlmServer(), max_body_bytes=20_000) as base,
        httpx.Client(base_url=f"{base}/v1", headers=headers) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0) as client:
        yield client


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_completion_tokens": 2**40}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logit_bias": {"3": 101}}, "logit_bias.3"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"sometimes": True}}, "stream_options.sometimes"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "format": {}}}, "response_format.format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)])
def test_bad_common_fields_are_named(
    http: httpx.Client, path: str, body: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    error = refusal(http.post(f"/{path}", json=body | fields), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "messages[0].role"),
        ({"messages": [*USER_HI, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "robot", "content": "hi", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "hi", "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
def test_bad_chat_fields_are_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = refusal(http.post("/chat/completions", json=CHAT | fields), 400)
    assert error["param"] == param
    assert param in error["message"] or "content part type" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"suffix": "end", "echo": True}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1, 2]}, "echo"),
        ({"messages": USER_HI}, "messages"),
    ],
)
def test_bad_completion_fields_are_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    error = refusal(http.post("/completions", json=COMPLETION | fields), 400)
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"text"', b'{"model": "\xff"}', b'{"a": NaN}', b"[" * 5000])
def test_malformed_bodies(http: httpx.Client, body: bytes) -> None:
    assert refusal(http.post("/chat/completions", content=body), 400)["code"] == "invalid_json"


def test_long_values_are_cut_in_messages(http: httpx.Client) -> None:
    error = refusal(http.post("/completions", json=COMPLETION | {"stop": ["x" * 10_000, ""]}), 400)
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("fields", "quoted"),
    [
        ({"logprobs": {"a": None}}, "'logprobs' is {\"a\": null}, expected"),
        ({"stop": ["a", ""]}, '\'stop\' is ["a", ""], expected'),
        ({"prompt": ["a"] * 1025}, "'prompt' holds 1025 prompts, expected at most 1024"),
    ],
)
def test_errors_quote_what_was_sent(http: httpx.Client, fields: dict[str, Any], quoted: str) -> None:
    assert quoted in refusal(http.post("/completions", json=COMPLETION | fields), 400)["message"]


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonl"])
def test_a_body_of_another_content_type_is_refused(http: httpx.Client, kind: str) -> None:
    for path, body in (("/completions", COMPLETION), ("/chat/completions", CHAT)):
        response = http.post(path, content=json.dumps(body), headers={"content-type": kind})
        error = refusal(response, 415)
        assert error["message"] == "Unsupported Media Type: Only 'application/json' is allowed"
    spelled = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post("/completions", content=json.dumps(COMPLETION), headers=spelled).status_code == 200


def test_huge_bodies(http: httpx.Client) -> None:
    body = b'{"model": "' + b"x" * 30_000 + b'"}'
    error = refusal(http.post("/completions", content=body), 413)
    assert error["code"] == "content_too_large"
    assert "larger than the 20000 bytes" in error["message"] and "--openai-max-input-size" in error["message"]
    pieces = (body[start : start + 1000] for start in range(0, len(body), 1000))
    assert refusal(http.post("/completions", content=pieces), 413)["code"] == "content_too_large"
    assert http.post("/completions", json=COMPLETION).status_code == 200


def test_bodies_of_many_objects_are_refused_before_they_are_parsed() -> None:
    braces = orjson.dumps(COMPLETION | {"user": "{" * (MAX_OBJECTS + 1)})
    assert json_object(braces)["user"].startswith("{")  # those in strings are none
    with pytest.raises(TritonError, match="has 65538 JSON objects and lists, expected at most 65536"):
        json_object(b'{"a":[' + b"[]," * MAX_OBJECTS + b"0]}")


def test_the_default_limit_of_bodies_is_that_of_the_flag() -> None:
    assert HttpFlags().openai_max_input_size == DEFAULT_MAX_BODY_BYTES == 4 << 20


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="nobody", prompt="hi")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="resnet", messages=USER_HI)


def test_model_that_is_loading(http: httpx.Client) -> None:
    response = http.post("/completions", json=COMPLETION | {"model": "young"})
    assert refusal(response, 503)["code"] == "unavailable"
    assert response.headers["retry-after"] == "1"


def test_a_model_that_could_not_be_loaded_says_why(http: httpx.Client) -> None:
    for response in (http.post("/completions", json=COMPLETION | {"model": FAILED}), http.get(f"/models/{FAILED}")):
        error = refusal(response, 503)
        assert error["message"] == f"the model '{FAILED}' could not be loaded: {REASON}"
        assert (error["code"], error["param"]) == ("unavailable", "model")
    for unloaded in ("gone", "unloaded"):
        assert refusal(http.get(f"/models/{unloaded}"), 404)["code"] == "model_not_found"


def test_model_without_the_input_an_endpoint_needs(client: openai.OpenAI) -> None:
    model = "org/completions-only"
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=model, messages=USER_HI)
    with pytest.raises(openai.BadRequestError, match="token ids"):
        client.completions.create(model=model, prompt=[1, 2])


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_the_model_come_before_the_status(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="context length is 2048") as caught:
        client.completions.create(model=MODEL, prompt="too long", stream=stream)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="hi", stream=stream, seed=13)
    assert caught.value.param == "seed"
    with pytest.raises(openai.InternalServerError) as overloaded:
        client.completions.create(model=MODEL, prompt="overloaded", stream=stream)
    assert overloaded.value.status_code == 503


def test_engine_failure_in_a_whole_response(http: httpx.Client) -> None:
    response = http.post("/completions", json=COMPLETION | {"prompt": ["hi", "too long"]})
    assert refusal(response, 400)["type"] == "invalid_request_error"


def test_a_stream_whose_last_step_fails_ends_with_an_error(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing(generation: Generation) -> dict[str, str]:
        raise KeyError("a bug")

    monkeypatch.setattr(Generation, "checked", failing)
    answer = http.post("/chat/completions", json=CHAT | {"stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert (
        json.loads([event for event in events if event != "[DONE]"][-1])["error"]["message"] == "internal server error"
    )
    assert "a bug" in caplog.text


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    assert refusal(http.get("/nothing"), 404)["code"] == "unknown_url"
    assert refusal(http.post("/embeddings", json={}), 404)["code"] == "unknown_url"
    for nothing in ("/", "/%2f", "/."):
        assert refusal(http.get(nothing), 404)["code"] == "unknown_url"
    wrong_method = http.get("/completions")
    assert refusal(wrong_method, 405)["code"] == "method_not_allowed"
    assert wrong_method.headers["allow"] == "POST"
    assert refusal(http.delete("/models/fake"), 405)["code"] == "method_not_allowed"
    assert refusal(http.get("../tokenize"), 405)["code"] == "method_not_allowed"
