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
TIME_TOOL: Any = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}


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
