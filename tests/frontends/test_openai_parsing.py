"""Arbitrary JSON: a request is parsed, or refused with a field's name, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmbackend.frontends.inference_gate import LARGE_BODY_BYTES
from llmbackend.frontends.openai import requests
from llmbackend.frontends.openai.errors import OpenAIError
from llmbackend.frontends.openai.requests import GenerationRequest, decode_cost, parse_chat, parse_completion

SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
KEYS = st.text(max_size=4) | st.just("type")
JSON = st.recursive(
    SCALARS,
    lambda items: (
        st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("type"), items, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "n",
        "logprobs",
        "top_logprobs",
        "stream",
        "stream_options",
        "echo",
        "suffix",
        "tools",
        "tool_choice",
        "response_format",
        "user",
        "metadata",
        "store",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "ignore_eos",
        "chat_template_kwargs",
        "messages",
        "prompt",
        "model",
    ]
)
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
@settings(derandomize=True, max_examples=80, deadline=None, database=None)
@given(fields=st.dictionaries(FIELDS, JSON, max_size=4))
def test_arbitrary_fields(parser: Any, other: str, fields: dict[str, Any]) -> None:
    parse(parser, {name: value for name, value in GOOD.items() if name != other} | fields)


@settings(derandomize=True, max_examples=120, deadline=None, database=None)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=2))
def test_arbitrary_messages(messages: list[Any]) -> None:
    parse(parse_chat, {"model": "m", "messages": messages})


def test_every_field_is_taken_or_refused() -> None:
    neutral = {"n": 1, "store": False, "user": "me", "tools": [], "response_format": {"type": "text"}, "suffix": None}
    assert parse_completion({"model": "m", "prompt": "hi", "n": 1, "suffix": None}).sampling == {"max_tokens": 16}
    with pytest.raises(OpenAIError, match="unknown field 'suffix'"):
        parse_chat({"model": "m", "messages": GOOD["messages"], **neutral})
    assert requests.parse_chat({"model": "m", "messages": GOOD["messages"], "tools": []}).is_chat


def test_many_small_objects_count_as_a_large_body() -> None:
    assert decode_cost(b'{"model":"m","prompt":"%b"}' % (b"a" * 1000)) == 1025
    many = b'{"messages":[' + b'{"role":"user","content":""},' * 2048 + b"]}"
    assert len(many) < LARGE_BODY_BYTES < decode_cost(many)
