"""The OpenAI Agents SDK over /v1/responses: function tools, handoffs, structured outputs, streams, sessions.

Part of `make clients`. Independent of the server. Invariant: every call goes through the SDK's Runner.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

QUIET = RunConfig(tracing_disabled=True)
GREEDY = ModelSettings(temperature=0, max_tokens=300)
REQUIRED = ModelSettings(temperature=0, max_tokens=300, tool_choice="required", parallel_tool_calls=False)


class Mood(BaseModel):
    mood: Literal["good", "bad"]


@pytest.fixture
async def model(base_url: str) -> AsyncIterator[OpenAIResponsesModel]:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield OpenAIResponsesModel(model="demo", openai_client=client)


def weather_tool(asked: list[str]) -> Any:
    @function_tool  # type: ignore[untyped-decorator]
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Get the weather of a city."""
        asked.append(city)
        return f"It is sunny in {city}."

    return get_weather


async def test_words(model: OpenAIResponsesModel) -> None:
    agent = Agent(name="one", instructions="Be short.", model=model, model_settings=GREEDY)
    result = await Runner.run(agent, "Who are you?", run_config=QUIET)
    assert result.final_output and result.context_wrapper.usage.output_tokens > 0


async def test_function_tool(model: OpenAIResponsesModel) -> None:
    """The SDK takes `required` back after the first call, so that the model then answers with words or calls again."""
    asked: list[str] = []
    agent = Agent(
        name="one",
        model=model,
        model_settings=REQUIRED,
        tools=[weather_tool(asked)],
        tool_use_behavior="stop_on_first_tool",
    )
    result = await Runner.run(agent, "What is the weather?", run_config=QUIET)
    assert asked and result.final_output == f"It is sunny in {asked[0]}."


async def test_stream(model: OpenAIResponsesModel) -> None:
    agent = Agent(name="one", model=model, model_settings=GREEDY)
    whole = await Runner.run(agent, "Who are you?", run_config=QUIET)
    run = Runner.run_streamed(agent, "Who are you?", run_config=QUIET)
    deltas = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == run.final_output == whole.final_output


async def test_streamed_tool(model: OpenAIResponsesModel) -> None:
    asked: list[str] = []
    agent = Agent(
        name="one",
        model=model,
        model_settings=REQUIRED,
        tools=[weather_tool(asked)],
        tool_use_behavior="stop_on_first_tool",
    )
    run = Runner.run_streamed(agent, "What is the weather?", run_config=QUIET)
    names = [event.name async for event in run.stream_events() if event.type == "run_item_stream_event"]
    assert asked and names[:2] == ["tool_called", "tool_output"]


async def test_handoff(model: OpenAIResponsesModel) -> None:
    second = Agent(name="second", instructions="Be short.", model=model, model_settings=GREEDY)
    first = Agent(name="first", model=model, model_settings=REQUIRED, handoffs=[handoff(second)])
    result = await Runner.run(first, "Who are you?", run_config=QUIET)
    assert result.last_agent.name == "second" and result.final_output


async def test_structured_output(model: OpenAIResponsesModel) -> None:
    agent = Agent(name="one", model=model, model_settings=GREEDY, output_type=Mood)
    result = await Runner.run(agent, "How are you?", run_config=QUIET)
    assert isinstance(result.final_output, Mood)


async def test_session(model: OpenAIResponsesModel) -> None:
    agent = Agent(name="one", model=model, model_settings=GREEDY)
    session = SQLiteSession("one")
    await Runner.run(agent, "Who are you?", session=session, run_config=QUIET)
    result = await Runner.run(agent, "And what can you do?", session=session, run_config=QUIET)
    assert result.final_output and len(await session.get_items()) == 4
    session.close()


async def test_previous_response(model: OpenAIResponsesModel) -> None:
    agent = Agent(name="one", model=model, model_settings=GREEDY)
    first = await Runner.run(agent, "Who are you?", run_config=QUIET)
    assert first.last_response_id
    second = await Runner.run(agent, "And you?", previous_response_id=first.last_response_id, run_config=QUIET)
    assert second.final_output


async def test_conversation(model: OpenAIResponsesModel, base_url: str) -> None:
    """A session that the server keeps."""
    agent = Agent(name="one", model=model, model_settings=GREEDY)
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        session = OpenAIConversationsSession(openai_client=client)
        await Runner.run(agent, "Who are you?", session=session, run_config=QUIET)
        result = await Runner.run(agent, "And what can you do?", session=session, run_config=QUIET)
        assert result.final_output and len(await session.get_items()) == 4
        await session.clear_session()
