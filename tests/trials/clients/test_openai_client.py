"""The `openai` package, its helpers included: `make test` runs this with the newest release, `make clients` with an
older one too.

Every answer is short because its schema bounds it, so that any model passes: what is tested is the client, not wit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow

MODEL = "demo"
HELLO: list[Any] = [{"role": "user", "content": "Who are you?"}]
ASK_WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Verdict(BaseModel):
    """What the model has to answer."""

    mood: Literal["good", "bad"]
    points: int = Field(ge=0, le=9)
    words: list[Literal["red", "green"]] = Field(min_length=1, max_length=2)


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=7)


WEATHER_TOOL: Any = openai.pydantic_function_tool(GetWeather)


class GetTime(BaseModel):
    """The time."""


TIME_TOOL: Any = openai.pydantic_function_tool(GetTime)


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any] = HELLO, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **({"temperature": 0} | options))


class TestChat:
    def test_models(self, client: openai.OpenAI) -> None:
        assert MODEL in [model.id for model in client.models.list()]
        assert client.models.retrieve(MODEL).id == MODEL

    def test_a_stream_is_the_whole_answer(self, client: openai.OpenAI) -> None:
        whole = ask(client)
        chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
        )
        assert chunks[-1].usage == whole.usage and whole.usage.completion_tokens > 0
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
        assert whole.choices[0].finish_reason == "stop"

    def test_the_stream_helper(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(model=MODEL, messages=HELLO, temperature=0) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert final.choices[0].message.content == ask(client).choices[0].message.content
        assert {"chunk", "content.delta", "content.done"} <= set(kinds)

    def test_the_raw_response(self, client: openai.OpenAI) -> None:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=4)
        assert raw.headers["content-type"] == "application/json" and raw.parse().usage is not None

    def test_the_streaming_response(self, client: openai.OpenAI) -> None:
        options: Any = {"model": MODEL, "messages": HELLO, "stream": True}
        with client.chat.completions.with_streaming_response.create(**options) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert all(json.loads(line.removeprefix("data: "))["object"] for line in lines[:-1])

    async def _async_answers(self, base_url: str) -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=60) as client:
            options: Any = {"model": MODEL, "messages": HELLO, "temperature": 0}
            whole = await client.chat.completions.create(**options)
            stream = await client.chat.completions.create(**options, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            return whole.choices[0].message.content or "", text

    def test_the_asynchronous_client(self, base_url: str) -> None:
        import asyncio

        whole, streamed = asyncio.run(self._async_answers(base_url))
        assert whole == streamed != ""

    def test_log_probabilities(self, client: openai.OpenAI) -> None:
        answer = ask(client, logprobs=True, top_logprobs=2, max_tokens=3)
        entries = answer.choices[0].logprobs.content
        assert len(entries) == 3 and all(len(entry.top_logprobs) == 2 for entry in entries)

    def test_a_refusal_names_the_field(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, temperature=-3)
        assert refused.value.param == "temperature" and "temperature" in refused.value.message
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="absent", messages=HELLO)

    def test_a_client_that_goes_away(self, client: openai.OpenAI) -> None:
        stream = ask(client, stream=True, max_tokens=500, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        assert ask(client, max_tokens=2).usage.completion_tokens == 2


class TestCompletions:
    def test_whole_and_stream(self, client: openai.OpenAI) -> None:
        options: Any = {"model": MODEL, "prompt": ["one two", "red"], "max_tokens": 8, "temperature": 0}
        whole = client.completions.create(**options)
        texts = ["", ""]
        for chunk in client.completions.create(**options, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [choice.text for choice in whole.choices]


class TestStructuredOutput:
    def test_parse(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Verdict, temperature=0)
        assert isinstance(answer.choices[0].message.parsed, Verdict)

    def test_the_stream_helper_parses(self, client: openai.OpenAI) -> None:
        options: Any = {"model": MODEL, "messages": HELLO, "response_format": Verdict, "temperature": 0}
        with client.chat.completions.stream(**options) as stream:
            done = [event for event in stream if event.type == "content.done"]
            final = stream.get_final_completion().choices[0].message
        whole = client.chat.completions.parse(**options).choices[0].message
        assert isinstance(final.parsed, Verdict) and final.parsed == whole.parsed == done[0].parsed
        assert final.content == whole.content

    def test_json_object(self, client: openai.OpenAI) -> None:
        answer = ask(client, response_format={"type": "json_object"}, max_tokens=200).choices[0]
        assert answer.message.content.startswith("{")
        if answer.finish_reason == "stop":
            assert isinstance(json.loads(answer.message.content), dict)

    def test_a_truncated_answer_is_no_parsed_one(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Verdict, max_tokens=3)

    def test_a_bad_schema_is_refused_by_name(self, client: openai.OpenAI) -> None:
        schema = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "strin"}}}}
        with pytest.raises(openai.BadRequestError, match="strin"):
            ask(client, response_format={"type": "json_schema", "json_schema": schema})

    def test_several_choices(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Verdict, n=3, seed=5, temperature=1.0
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert all(isinstance(choice.message.parsed, Verdict) for choice in answer.choices)


class TestTools:
    def test_a_required_call_is_parsed(self, client: openai.OpenAI) -> None:
        options: Any = {"tools": [WEATHER_TOOL, TIME_TOOL], "tool_choice": "required", "temperature": 0}
        answer = client.chat.completions.parse(model=MODEL, messages=ASK_WEATHER, **options).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
        for call in answer.message.tool_calls:
            assert call.id and isinstance(call.function.parsed_arguments, GetWeather | GetTime)

    def test_a_named_call(self, client: openai.OpenAI) -> None:
        choice = {"type": "function", "function": {"name": "GetWeather"}}
        answer = ask(client, ASK_WEATHER, tools=[WEATHER_TOOL, TIME_TOOL], tool_choice=choice).choices[0]
        (call,) = answer.message.tool_calls
        assert call.function.name == "GetWeather" and GetWeather.model_validate_json(call.function.arguments)

    def test_a_streamed_call_is_the_whole_call(self, client: openai.OpenAI) -> None:
        options: Any = {"model": MODEL, "messages": ASK_WEATHER, "tools": [WEATHER_TOOL], "temperature": 0}
        options |= {"tool_choice": "required", "parallel_tool_calls": False}
        whole = client.chat.completions.parse(**options).choices[0]
        with client.chat.completions.stream(**options) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls and whole.message.tool_calls
        (call,), (expected,) = final.message.tool_calls, whole.message.tool_calls
        assert call.function.arguments == expected.function.arguments
        assert isinstance(call.function.parsed_arguments, GetWeather)
        assert final.finish_reason == whole.finish_reason == "tool_calls"
        assert "tool_calls.function.arguments.done" in kinds

    def test_the_result_of_a_tool_goes_back(self, client: openai.OpenAI) -> None:
        """One turn of an agent: question, call, result, answer."""
        messages = list(ASK_WEATHER)
        choice = {"type": "function", "function": {"name": "GetWeather"}}
        called = ask(client, messages, tools=[WEATHER_TOOL], tool_choice=choice).choices[0].message
        messages.append(called.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": '{"sky": "clear"}'}]
        answer = ask(client, messages, tools=[WEATHER_TOOL], tool_choice="none").choices[0]
        assert answer.message.content and not answer.message.tool_calls

    def test_the_model_calls_on_its_own(self, client: openai.OpenAI) -> None:
        """The bundled model was trained to call tools: nothing forces it here."""
        tool = {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": "Get the weather of a city",
                "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
            },
        }
        whole = ask(client, ASK_WEATHER, tools=[tool]).choices[0]
        deltas = [chunk.choices[0] for chunk in ask(client, ASK_WEATHER, tools=[tool], stream=True) if chunk.choices]
        (call,) = whole.message.tool_calls
        pieces = [piece for delta in deltas for piece in delta.delta.tool_calls or ()]
        assert (call.function.name, whole.finish_reason) == ("get_weather", "tool_calls")
        assert pieces[0].function.name == "get_weather" and pieces[0].id
        assert "".join(piece.function.arguments or "" for piece in pieces) == call.function.arguments
        assert json.loads(call.function.arguments).keys() == {"city"}
