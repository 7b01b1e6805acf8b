"""The `openai` package over /v1/responses and /v1/conversations: every call of the client, including its helpers.

Part of `make clients`, with the newest release and the newest 2.x. Independent of the server. Invariant: answers are
bounded by schemas or token limits, so that any model passes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "demo"
HELLO = "Who are you?"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
WORD: Any = {
    "type": "custom",
    "name": "say",
    "description": "Says a word",
    "format": {"type": "grammar", "syntax": "regex", "definition": "(red|green) [0-9]{2}"},
}


class Verdict(BaseModel):
    """What the model has to answer."""

    mood: Literal["good", "bad"]
    points: int = Field(ge=0, le=9)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, text: Any = HELLO, **options: Any) -> Any:
    return client.responses.create(model=MODEL, input=text, **({"temperature": 0} | options))


def until_ended(client: openai.OpenAI, response_id: str) -> Any:
    for _ in range(600):
        found = client.responses.retrieve(response_id)
        if found.status not in ("queued", "in_progress"):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{response_id} does not end")


class TestCreate:
    def test_whole(self, client: openai.OpenAI) -> None:
        answer = ask(client, instructions="Be short.", metadata={"who": "me"})
        assert answer.status == "completed" and answer.output_text and answer.id.startswith("resp_")
        assert answer.instructions == "Be short." and answer.metadata == {"who": "me"}
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens > 0

    def test_stream_is_the_whole(self, client: openai.OpenAI) -> None:
        whole = ask(client)
        events = list(ask(client, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert deltas == whole.output_text == events[-1].response.output_text
        assert events[-1].type == "response.completed" and events[-1].response.usage == whole.usage

    def test_stream_helper(self, client: openai.OpenAI) -> None:
        with client.responses.stream(model=MODEL, input=HELLO, temperature=0) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_response()
        assert final.output_text == ask(client).output_text
        assert {"response.output_text.delta", "response.completed"} <= kinds

    def test_parse(self, client: openai.OpenAI) -> None:
        answer = client.responses.parse(model=MODEL, input=HELLO, text_format=Verdict, temperature=0)
        assert isinstance(answer.output_parsed, Verdict)

    def test_stream_helper_parses(self, client: openai.OpenAI) -> None:
        with client.responses.stream(model=MODEL, input=HELLO, text_format=Verdict, temperature=0) as stream:
            final = stream.until_done().get_final_response()
        assert isinstance(final.output_parsed, Verdict)

    def test_items_in(self, client: openai.OpenAI) -> None:
        items: Any = [
            {"role": "developer", "content": "Be short."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": HELLO}]},
        ]
        assert ask(client, items).output_text

    def test_length(self, client: openai.OpenAI) -> None:
        answer = ask(client, max_output_tokens=2, extra_body={"ignore_eos": True})
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"

    def test_log_probabilities(self, client: openai.OpenAI) -> None:
        answer = ask(client, top_logprobs=2, include=["message.output_text.logprobs"], max_output_tokens=3)
        (message,) = answer.output
        assert all(len(entry.top_logprobs) == 2 for entry in message.content[0].logprobs)
        assert message.content[0].logprobs

    def test_raw_and_streaming(self, client: openai.OpenAI) -> None:
        raw = client.responses.with_raw_response.create(model=MODEL, input=HELLO, max_output_tokens=2)
        assert raw.parse().id.startswith("resp_")
        options: Any = {"model": MODEL, "input": HELLO, "stream": True}
        with client.responses.with_streaming_response.create(**options) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert any(line.startswith("event: response.completed") for line in answer.iter_lines())

    def test_asynchronous(self, client: openai.OpenAI, base_url: str) -> None:
        async def answers() -> str:
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as other:
                stream: Any = await other.responses.create(model=MODEL, input=HELLO, temperature=0, stream=True)
                return "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])

        assert asyncio.run(answers()) == ask(client).output_text

    def test_refusals(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, temperature=-3)
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="absent", input=HELLO)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_absent")
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            ask(client, previous_response_id="resp_absent")


class TestTools:
    def test_function(self, client: openai.OpenAI) -> None:
        asked: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
        answer = ask(client, "What is the weather in Paris?", **asked)
        (call,) = [item for item in answer.output if item.type == "function_call"]
        assert call.name == "get_weather" and GetWeather.model_validate_json(call.arguments)
        events = list(ask(client, "What is the weather in Paris?", stream=True, **asked))
        deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
        (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
        assert deltas == done.arguments == call.arguments
        items: Any = [{"role": "user", "content": "What is the weather in Paris?"}, *answer.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
        assert ask(client, items, tools=[WEATHER], tool_choice="none").output_text

    def test_parsed_function(self, client: openai.OpenAI) -> None:
        tools: Any = [openai.pydantic_function_tool(GetWeather)]
        options: Any = {"model": MODEL, "input": HELLO, "tool_choice": "required", "temperature": 0}
        answer = client.responses.parse(tools=tools, **options)
        calls = [item for item in answer.output if item.type == "function_call"]
        assert calls and all(isinstance(call.parsed_arguments, GetWeather) for call in calls)

    def test_custom(self, client: openai.OpenAI) -> None:
        import re

        asked: Any = {"tools": [WORD], "tool_choice": {"type": "custom", "name": "say"}}
        answer = ask(client, **asked)
        call = next(item for item in answer.output if item.type == "custom_tool_call")
        assert call.name == "say" and re.fullmatch("(red|green) [0-9]{2}", call.input)
        events = list(ask(client, stream=True, **asked))
        first = next(e for e in events if e.type == "response.custom_tool_call_input.done")
        deltas = [e for e in events if e.type == "response.custom_tool_call_input.delta" and e.item_id == first.item_id]
        assert "".join(e.delta for e in deltas) == first.input == call.input
        items: Any = [{"role": "user", "content": HELLO}, *answer.output]
        items += [
            {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "said"}
            for item in answer.output
            if item.type == "custom_tool_call"
        ]
        assert ask(client, items, tools=[WORD], tool_choice="none").output_text

    def test_allowed_tools(self, client: openai.OpenAI) -> None:
        choice: Any = {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        }
        answer = ask(client, tools=[WEATHER, WORD], tool_choice=choice)
        assert {item.type for item in answer.output} <= {"function_call", "message", "reasoning"}
        assert any(item.type == "function_call" for item in answer.output)


class TestStored:
    def test_retrieve_items_delete(self, client: openai.OpenAI) -> None:
        made = ask(client)
        found = client.responses.retrieve(made.id)
        assert found.model_dump() == made.model_dump()
        [item] = [item.model_dump() for item in client.responses.input_items.list(made.id)]
        assert item["role"] == "user" and item["content"][0]["text"] == HELLO
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)

    def test_chain(self, client: openai.OpenAI) -> None:
        first = ask(client)
        second = ask(client, "And you?", previous_response_id=first.id)
        assert second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens
        flat: Any = [{"role": "user", "content": HELLO}, *first.output, {"role": "user", "content": "And you?"}]
        assert ask(client, flat).output_text == second.output_text
        [item] = [item.model_dump() for item in client.responses.input_items.list(second.id)]
        assert item["content"][0]["text"] == "And you?"

    def test_not_stored(self, client: openai.OpenAI) -> None:
        made = ask(client, store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)

    def test_background(self, client: openai.OpenAI) -> None:
        made = ask(client, background=True)
        assert made.status in ("queued", "in_progress") and made.background
        assert until_ended(client, made.id).output_text == ask(client).output_text

    def test_background_stream_is_read_on(self, client: openai.OpenAI) -> None:
        stream = ask(client, background=True, stream=True)
        first = []
        for event in stream:
            first.append(event)
            if len(first) == 4:
                break
        stream.close()
        response_id = first[0].response.id
        cursor = first[-1].sequence_number
        rest = list(client.responses.retrieve(response_id, stream=True, starting_after=cursor))
        assert [event.sequence_number for event in rest] == list(range(cursor + 1, cursor + 1 + len(rest)))
        everything = list(client.responses.retrieve(response_id, stream=True))
        assert [e.model_dump() for e in everything] == [e.model_dump() for e in (*first, *rest)]

    def test_cancel(self, client: openai.OpenAI) -> None:
        made = ask(client, background=True, max_output_tokens=800, extra_body={"ignore_eos": True})
        client.responses.cancel(made.id)
        assert until_ended(client, made.id).status == "cancelled"


class TestConversations:
    def test_life(self, client: openai.OpenAI) -> None:
        made = client.conversations.create(
            metadata={"topic": "x"}, items=[{"type": "message", "role": "user", "content": "My name is Ann."}]
        )
        assert client.conversations.retrieve(made.id).metadata == {"topic": "x"}
        assert client.conversations.update(made.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
        client.conversations.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made.id)

    def test_items(self, client: openai.OpenAI) -> None:
        made = client.conversations.create()
        added = client.conversations.items.create(
            made.id, items=[{"type": "message", "role": "user", "content": "My name is Ann."}]
        )
        (item,) = added.data
        assert client.conversations.items.retrieve(item.id or "", conversation_id=made.id).id == item.id
        assert [one.id for one in client.conversations.items.list(made.id)] == [item.id]
        client.conversations.items.delete(item.id or "", conversation_id=made.id)
        assert list(client.conversations.items.list(made.id)) == []

    def test_responses_in_it(self, client: openai.OpenAI) -> None:
        made = client.conversations.create()
        first = ask(client, conversation=made.id)
        second = ask(client, "And you?", conversation=made.id)
        assert second.usage.input_tokens > first.usage.input_tokens
        kinds = [item.type for item in client.conversations.items.list(made.id, order="asc")]
        assert kinds == ["message"] * 4
