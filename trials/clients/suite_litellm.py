"""LiteLLM: `openai/…` models for chat, completions and responses, `anthropic/…` models, and its classification of
errors.

Part of `make clients`. Independent of the server. Invariant: every call goes through LiteLLM's own functions.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
import pytest
from pydantic import BaseModel

HELLO: list[Any] = [{"role": "user", "content": "Who are you?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Mood(BaseModel):
    mood: Literal["good", "bad"]


@pytest.fixture
def options(base_url: str) -> dict[str, Any]:
    return {"model": "openai/demo", "api_base": base_url, "api_key": "none", "temperature": 0, "num_retries": 0}


def test_chat(options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HELLO, **options)
    assert answer.choices[0].message.content and answer.usage.completion_tokens > 0


def test_stream(options: dict[str, Any]) -> None:
    whole = litellm.completion(messages=HELLO, **options)
    chunks = list(litellm.completion(messages=HELLO, stream=True, stream_options={"include_usage": True}, **options))
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == whole.usage.completion_tokens


async def test_asynchronous(options: dict[str, Any]) -> None:
    whole = await litellm.acompletion(messages=HELLO, **options)
    stream = await litellm.acompletion(messages=HELLO, stream=True, **options)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content


def test_text_completion(options: dict[str, Any]) -> None:
    answer = litellm.text_completion(prompt="one two", **(options | {"model": "text-completion-openai/demo"}))
    assert answer.choices[0].finish_reason and answer.usage.completion_tokens > 0


def test_the_provider_for_vllm(options: dict[str, Any]) -> None:
    """`hosted_vllm/…`, as gateways name a server of vLLM."""
    vllm = options | {"model": "hosted_vllm/demo"}
    whole = litellm.completion(messages=HELLO, **vllm)
    assert whole.choices[0].message.content == litellm.completion(messages=HELLO, **options).choices[0].message.content
    chunks = litellm.completion(messages=HELLO, stream=True, **vllm)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_triton(base_url: str) -> None:
    """LiteLLM's provider of Triton's generate."""
    url = base_url.removesuffix("/v1") + "/v2/models/demo/generate"
    assert litellm.completion(model="triton/demo", api_base=url, messages=HELLO).choices[0].message.content


def test_response_format(options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HELLO, response_format=Mood, **options)
    assert Mood.model_validate_json(answer.choices[0].message.content)


def test_required_tool(options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HELLO, tools=[WEATHER], tool_choice="required", **options)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def test_streamed_tool(options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "required", **options}
    whole = litellm.completion(**asked).choices[0]
    built = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)), messages=HELLO).choices[0]
    assert [(call.id != "", call.function) for call in built.message.tool_calls] == [
        (call.id != "", call.function) for call in whole.message.tool_calls
    ]
    assert built.finish_reason == whole.finish_reason == "tool_calls"


def test_several_choices(options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HELLO, n=2, max_tokens=4, **options)
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_errors_have_their_kind(options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=HELLO, **(options | {"temperature": -3}))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=HELLO, **(options | {"model": "openai/absent"}))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "word " * 5000}], **options)


def responses_options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != "num_retries"} | {"input": "Who are you?"}


def test_responses(options: dict[str, Any]) -> None:
    asked = responses_options(options)
    whole = litellm.responses(**asked)
    (message,) = [item for item in whole.output if item.type == "message"]
    assert message.content[0].text and whole.usage.output_tokens > 0
    events = list(litellm.responses(stream=True, **asked))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == message.content[0].text and events[-1].type == "response.completed"


def test_responses_required_tool(options: dict[str, Any]) -> None:
    asked = responses_options(options)
    function: Any = WEATHER["function"]
    answer = litellm.responses(tools=[{"type": "function", **function}], tool_choice="required", **asked)
    call = next(item for item in answer.output if item.type == "function_call")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")


@pytest.fixture
def anthropic_options(base_url: str) -> dict[str, Any]:
    url = base_url.removesuffix("/v1")
    return {"model": "anthropic/demo", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 200}


def test_anthropic(anthropic_options: dict[str, Any]) -> None:
    """Chat completions made of Anthropic's messages."""
    whole = litellm.completion(messages=HELLO, **anthropic_options)
    assert whole.choices[0].message.content and whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=HELLO, stream=True, **anthropic_options))
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert built.choices[0].message.content == whole.choices[0].message.content


def test_anthropic_required_tool(anthropic_options: dict[str, Any]) -> None:
    answer = litellm.completion(messages=HELLO, tools=[WEATHER], tool_choice="required", **anthropic_options)
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


async def test_anthropic_messages(anthropic_options: dict[str, Any]) -> None:
    """Anthropic's own interface."""
    answer: Any = await litellm.anthropic.messages.acreate(messages=HELLO, **anthropic_options)
    assert answer["content"][0]["text"] and answer["stop_reason"] == "end_turn"


def test_anthropic_errors(anthropic_options: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=HELLO, **(anthropic_options | {"temperature": -3}))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=HELLO, **(anthropic_options | {"model": "anthropic/absent"}))
