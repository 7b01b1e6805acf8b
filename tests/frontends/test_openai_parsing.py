"""Arbitrary JSON: a request is parsed, or refused with a field's name, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.frontends.generation.request import GenerationRequest, LogprobForm, StreamForm
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.inference_gate import LARGE_BODY_BYTES
from llmbackend.frontends.openai.endpoints import decode_cost
from llmbackend.frontends.openai.requests import parse_chat, parse_completion, with_defaults
from llmbackend.frontends.openai.schema import ChatCompletionRequest, CompletionRequest
from llmbackend.frontends.protocol_options import RequestDefaults

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
KEYS = st.text(max_size=4) | st.just("type")
JSON = st.recursive(
    SCALARS,
    lambda items: (
        st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("type"), items, max_size=3)
    ),
    max_leaves=8,
)
CHAT_FIELDS, COMPLETION_FIELDS = sorted(ChatCompletionRequest.model_fields), sorted(CompletionRequest.model_fields)
FIELDS = st.sampled_from(sorted({*CHAT_FIELDS, *COMPLETION_FIELDS}))
MESSAGE_FIELDS = st.sampled_from(
    ["role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning_content", "function_call"]
)
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
MESSAGE = st.dictionaries(MESSAGE_FIELDS, JSON, max_size=4) | st.builds(
    lambda role, fields: fields | {"role": role}, ROLES, st.dictionaries(MESSAGE_FIELDS, JSON, max_size=4)
)
GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


def parse(parser: Callable[[dict[str, Any]], GenerationRequest], body: dict[str, Any]) -> None:
    try:
        request = parser(body)
    except OpenAIError as error:
        assert error.status == 400
        assert error.param
        assert orjson.loads(error.body())["error"]["message"]
    else:
        assert len(request.prompts) == len(request.echo) >= 1


@pytest.mark.parametrize(("parser", "other"), [(parse_chat, "prompt"), (parse_completion, "messages")])
@given(fields=st.dictionaries(FIELDS, JSON, max_size=4))
def test_arbitrary_fields(parser: Any, other: str, fields: dict[str, Any]) -> None:
    parse(parser, {name: value for name, value in GOOD.items() if name != other} | fields)


@given(messages=st.lists(MESSAGE, min_size=1, max_size=2))
def test_arbitrary_messages(messages: list[Any]) -> None:
    parse(parse_chat, {"model": "m", "messages": messages})


@pytest.mark.parametrize(
    ("parser", "other", "own", "others"),
    [
        (parse_chat, "prompt", CHAT_FIELDS, COMPLETION_FIELDS),
        (parse_completion, "messages", COMPLETION_FIELDS, CHAT_FIELDS),
    ],
)
def test_every_field_of_the_schema_is_read_and_those_of_the_other_endpoint_are_not(
    parser: Any, other: str, own: list[str], others: list[str]
) -> None:
    good = {name: value for name, value in GOOD.items() if name != other}
    for name in own:
        with pytest.raises(OpenAIError) as wrong:
            parser(good | {name: [[["x"]]]})
        assert str(wrong.value.param).startswith(name) and "unknown field" not in str(wrong.value)
        if name not in good:
            parser(good | {name: None})
    for name in {*others, "no_such_field"} - {*own}:
        with pytest.raises(OpenAIError, match=f"unknown field '{name}'"):
            parser(good | {name: 1})


def test_neutral_values_are_taken() -> None:
    assert parse_completion({"model": "m", "prompt": "hi", "n": 1, "suffix": None}).sampling == {"max_tokens": 16}
    neutral = {"n": 1, "store": False, "user": "me", "tools": [], "response_format": {"type": "text"}}
    assert parse_chat({"model": "m", "messages": GOOD["messages"], **neutral}).is_chat


@pytest.mark.parametrize("missing", [{}, {"include_metrics": None, "stream_interval": None, "stream_options": None}])
def test_the_operators_defaults_apply_to_fields_that_are_missing_or_null(missing: dict[str, Any]) -> None:
    defaults = RequestDefaults(
        return_tokens_as_token_ids=True, force_include_usage=True, stream_interval_tokens=4, per_request_metrics=True
    )
    body = {"model": "m", "prompt": "hi", "stream": True, "return_tokens_as_token_ids": None} | missing
    request = parse_completion(with_defaults(body, defaults))
    assert request.include_metrics and request.stream == StreamForm(True, True, 4)
    for logprobs in (0, 2):  # 0: those of the chosen tokens alone
        assert parse_completion(with_defaults(body | {"logprobs": logprobs}, defaults)).logprobs == LogprobForm(
            logprobs, as_token_ids=True
        )
    own = {"return_tokens_as_token_ids": False, "stream_interval": 5, "include_metrics": False, "logprobs": 0}
    request = parse_completion(with_defaults(body | own, defaults))
    assert request.stream == StreamForm(True, True, 5)
    assert (request.logprobs, request.include_metrics) == (LogprobForm(0), False)


def test_the_operators_stream_interval_is_the_least() -> None:
    defaults = RequestDefaults(stream_interval_tokens=4)
    body = {"model": "m", "prompt": "hi", "stream": True}
    assert parse_completion(with_defaults(body | {"stream_interval": 2}, defaults)).stream == StreamForm(None, None, 4)
    for wrong in (0, -1, True, "2"):
        with pytest.raises(OpenAIError) as refused:
            parse_completion(with_defaults(body | {"stream_interval": wrong}, defaults))
        assert refused.value.param == "stream_interval"
    whole = {"model": "m", "prompt": "hi", "stream_interval": 2}
    assert parse_completion(with_defaults(whole, defaults)).stream is None


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": False}])
def test_no_top_logprobs_need_no_logprobs(logprobs: dict[str, Any]) -> None:
    chat = {"model": "m", "messages": GOOD["messages"], **logprobs}
    assert parse_chat(chat | {"top_logprobs": 0}).logprobs is None
    for top in (1, -1):
        with pytest.raises(OpenAIError, match="'logprobs': true"):
            parse_chat(chat | {"top_logprobs": top})


def test_a_content_part_that_is_no_object_is_refused_in_plain_words() -> None:
    with pytest.raises(OpenAIError, match=r"^'messages\[0\]\.content\[0\]' is \"x\", expected an object$"):
        parse_chat({"model": "m", "messages": [{"role": "user", "content": ["x"]}]})


def test_many_small_objects_count_as_a_large_body() -> None:
    assert decode_cost(b'{"model":"m","prompt":"%b"}' % (b"a" * 1000)) == 1025
    many = b'{"messages":[' + b'{"role":"user","content":""},' * 2048 + b"]}"
    assert len(many) < LARGE_BODY_BYTES < decode_cost(many)
