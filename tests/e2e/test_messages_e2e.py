"""Anthropic's Messages API of a real server with the bundled model, through the official client: whole and streamed,
with tools that must be called and run, forms, counts of tokens, and models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.helpers.server_process import ServerProcess

pytestmark = pytest.mark.slow
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def client(demo_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://{demo_server.http}", api_key="none", max_retries=0) as opened:
        yield opened


def asked(**options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 60}
    return {"model": "demo", "extra_body": {"seed": 3, "temperature": 1.0}, **defaults, **options}


def content(message: Any) -> list[dict[str, Any]]:
    """But for the ids of calls."""
    return [{**block.to_dict(), "id": ""} for block in message.content]


def test_a_message_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**asked(system="Be brief."))
    assert whole.stop_reason in ("end_turn", "max_tokens") and 0 < whole.usage.output_tokens <= 60
    with client.messages.stream(**asked(system="Be brief.")) as stream:
        texts = list(stream.text_stream)
        again = stream.get_final_message()
    assert content(again) == content(whole) and "".join(texts) == whole.content[0].text != ""
    assert again.usage.output_tokens == whole.usage.output_tokens


def test_calls_that_must_be_made_and_the_turn_behind_them(client: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 200}
    first = client.messages.create(**asked(**options))
    calls = [block for block in first.content if block.type == "tool_use"]
    assert first.stop_reason == "tool_use" and all(call.input["city"] in ("Paris", "Rome") for call in calls)
    with client.messages.stream(**asked(**options)) as stream:
        assert content(stream.get_final_message()) == content(first)
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
    history = [{"role": "user", "content": "Who are you?"}, first.to_param(), {"role": "user", "content": results}]
    options = {"tools": [WEATHER], "tool_choice": {"type": "none"}}
    assert client.messages.create(**asked(messages=history, **options)).content[0].text


def test_a_form(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    message = client.messages.create(**asked(output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert json.loads(message.content[0].text)["n"] in (1, 2)


def test_a_stop_sequence(client: anthropic.Anthropic) -> None:
    text = client.messages.create(**asked()).content[0].text
    message = client.messages.create(**asked(stop_sequences=[text[3:6]]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[3:6])
    assert message.content[0].text == text[: text.index(text[3:6])]


def test_tokens_are_counted_and_models_listed(client: anthropic.Anthropic) -> None:
    prompt = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}], "tools": [WEATHER]}
    usage = client.messages.create(**asked(tools=[WEATHER])).usage
    counted = client.messages.count_tokens(**prompt).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens > 0
    assert [model.id for model in client.models.list()] == ["demo"]
