"""The `anthropic` package: messages, streams and their helper, tools, returned thinking, token counts, errors.

Part of `make clients`. Independent of the server. Invariant: answers are bounded by token limits or schemas, so that
any model passes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

MODEL = "demo"
HELLO: list[Any] = [{"role": "user", "content": "Who are you?"}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
"""The package no longer has these parameters itself."""
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(base_url: str) -> Iterator[Any]:
    url = base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: Any, messages: list[Any] = HELLO, **options: Any) -> Any:
    return client.messages.create(model=MODEL, messages=messages, **({"max_tokens": 200} | GREEDY | options))


def test_whole(client: Any) -> None:
    answer = ask(client, system="Be short.")
    assert answer.id.startswith("msg_") and answer.role == "assistant" and answer.stop_reason == "end_turn"
    assert answer.content[0].text and answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0


def test_stream_is_the_whole(client: Any) -> None:
    whole = ask(client)
    events = list(ask(client, stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == whole.content[0].text
    assert events[-2].delta.stop_reason == whole.stop_reason
    assert events[-2].usage.output_tokens == whole.usage.output_tokens


def test_stream_helper(client: Any) -> None:
    with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=200, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == ask(client).content[0].text


def test_asynchronous(client: Any, base_url: str) -> None:
    async def answer() -> Any:
        url = base_url.removesuffix("/v1")
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other,
            other.messages.stream(model=MODEL, messages=HELLO, max_tokens=200, **GREEDY) as stream,
        ):
            return await stream.get_final_message()

    assert asyncio.run(answer()).content[0].text == ask(client).content[0].text


def test_beta(client: Any) -> None:
    options: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 200, **GREEDY}
    answer = client.beta.messages.create(betas=["interleaved-thinking-2025-05-14"], **options)
    assert answer.content[0].text == ask(client).content[0].text


def test_raw(client: Any) -> None:
    raw = client.messages.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert raw.headers["request-id"] and raw.parse().stop_reason in ("max_tokens", "end_turn")


def test_stop_sequence(client: Any) -> None:
    whole = ask(client).content[0].text
    word = whole.split()[1]
    answer = ask(client, stop_sequences=[word])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", word)
    assert whole.startswith("".join(block.text for block in answer.content))


def test_length(client: Any) -> None:
    answer = ask(client, max_tokens=2)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 2


def test_forced_tool_and_its_result(client: Any) -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    answer = ask(client, tools=[WEATHER], tool_choice=choice)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.id.startswith("toolu_") and call.input["city"] in ("Paris", "Rome")
    content = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]
    messages = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": content}]
    assert ask(client, messages, tools=[WEATHER], tool_choice={"type": "none"}).content[0].text


def test_streamed_tool(client: Any) -> None:
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "any"}, "max_tokens": 200, **GREEDY}
    whole = ask(client, **asked)
    with client.messages.stream(model=MODEL, messages=HELLO, **asked) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    calls = [block for block in final.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [block.input for block in whole.content if block.type == "tool_use"]
    if len(calls) == 1:
        assert json.loads("".join(pieces)) == calls[0].input


def test_tool_runner(client: Any) -> None:
    asked = []

    @anthropic.beta_tool  # type: ignore[untyped-decorator]
    def get_weather(city: str) -> str:
        """Get the weather of a city.

        Args:
            city: Its name.
        """
        asked.append(city)
        return "It is sunny."

    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, tools=[get_weather], messages=messages, max_iterations=2, **GREEDY
    )
    answers = list(runner)
    assert len(answers) == 2 and len(asked) == 1


def test_count_tokens(client: Any) -> None:
    count = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be short.", tools=[WEATHER])
    usage = ask(client, system="Be short.", tools=[WEATHER]).usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_blocks_in(client: Any) -> None:
    cached: Any = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}]
    answer = ask(client, messages, system=[cached], metadata={"user_id": "me"}, extra_body={"top_k": 5, "top_p": 0.9})
    assert answer.content[0].text


def test_prefill(client: Any) -> None:
    """The model goes on behind the assistant's words."""
    answer = ask(client, [*HELLO, {"role": "assistant", "content": "I am"}], max_tokens=4)
    assert answer.usage.output_tokens <= 4


def test_errors(client: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(client, extra_body={"temperature": -3})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="absent", messages=HELLO, max_tokens=2)
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(model=MODEL, messages=[], max_tokens=2)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_a_client_that_goes_away(client: Any) -> None:
    stream = ask(client, stream=True, max_tokens=800)
    next(iter(stream))
    stream.close()
    assert ask(client, max_tokens=2).usage.output_tokens == 2
