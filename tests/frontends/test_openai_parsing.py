"""Arbitrary JSON: a request is parsed, or refused with a field's name, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmbackend.frontends.generation.request import GenerationRequest
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.inference_gate import LARGE_BODY_BYTES
from llmbackend.frontends.openai.endpoints import decode_cost
from llmbackend.frontends.openai.requests import parse_chat, parse_completion
from llmbackend.frontends.openai.schema import ChatCompletionRequest, CompletionRequest

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


def test_many_small_objects_count_as_a_large_body() -> None:
    assert decode_cost(b'{"model":"m","prompt":"%b"}' % (b"a" * 1000)) == 1025
    many = b'{"messages":[' + b'{"role":"user","content":""},' * 2048 + b"]}"
    assert len(many) < LARGE_BODY_BYTES < decode_cost(many)
