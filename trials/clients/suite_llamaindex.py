"""LlamaIndex: OpenAILike, chat and completion, programs of pydantic models, and an agent's function call; the same with
OpenAIResponses and Anthropic.

Part of `make clients`. Independent of the server. Invariant: every call goes through LlamaIndex's own functions.
"""

# Annotations are values here: LlamaIndex makes the tool's schema from them.

from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

HELLO = "Who are you?"


class Mood(BaseModel):
    """A mood."""

    mood: Literal["good", "bad"]


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"It is sunny in {city}."


@pytest.fixture
def llm(base_url: str) -> Any:
    return OpenAILike(
        model="demo",
        api_base=base_url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=1024,
        temperature=0,
        max_retries=0,
    )


def test_complete(llm: Any) -> None:
    assert llm.complete(HELLO).text


def test_stream(llm: Any) -> None:
    messages = [ChatMessage(role="user", content=HELLO)]
    whole = llm.chat(messages).message.content
    assert "".join(piece.delta or "" for piece in llm.stream_chat(messages)) == whole


async def test_asynchronous(llm: Any) -> None:
    messages = [ChatMessage(role="user", content=HELLO)]
    whole = (await llm.achat(messages)).message.content
    pieces = [piece.delta or "" async for piece in await llm.astream_chat(messages)]
    assert "".join(pieces) == whole


def test_text_completions(base_url: str) -> None:
    llm = OpenAILike(model="demo", api_base=base_url, api_key="none", is_chat_model=False, max_tokens=5)
    assert llm.complete("one two three").raw.usage.prompt_tokens > 2


def test_structured_prediction(llm: Any) -> None:
    assert isinstance(llm.as_structured_llm(Mood).complete(HELLO).raw, Mood)


def test_structured_prediction_by_function(llm: Any) -> None:
    by_function = llm.model_copy(update={"should_use_structured_outputs": False})
    assert isinstance(by_function.as_structured_llm(Mood).complete(HELLO).raw, Mood)


def test_required_tool(llm: Any) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = llm.chat_with_tools([tool], user_msg=HELLO, tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "get_weather" and calls[0].tool_kwargs["city"] in ("Paris", "Rome")


def test_streamed_tool(llm: Any) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    *_, last = llm.stream_chat_with_tools([tool], user_msg=HELLO, tool_required=True)
    assert llm.get_tool_calls_from_response(last)[0].tool_kwargs["city"] in ("Paris", "Rome")


def test_predict_and_call(llm: Any) -> None:
    """An agent's step: the model calls the function, LlamaIndex runs it."""
    tool = FunctionTool.from_defaults(get_weather)
    answer = llm.predict_and_call([tool], user_msg=HELLO, tool_required=True)
    assert "sunny" in str(answer)


@pytest.fixture(params=["responses", "anthropic"])
def other_llm(request: pytest.FixtureRequest, base_url: str) -> Any:
    if request.param == "responses":
        return OpenAIResponses(
            model="demo", api_base=base_url, api_key="none", context_window=1024, temperature=0, max_retries=0
        )
    url = base_url.removesuffix("/v1")
    return Anthropic(
        model="claude-3-haiku-20240307", base_url=url, api_key="none", temperature=0, max_tokens=200, max_retries=0
    )


def test_other_apis_chat(other_llm: Any) -> None:
    messages = [ChatMessage(role="user", content=HELLO)]
    whole = other_llm.chat(messages).message.content
    assert whole and "".join(piece.delta or "" for piece in other_llm.stream_chat(messages)) == whole


async def test_other_apis_asynchronous(other_llm: Any) -> None:
    messages = [ChatMessage(role="user", content=HELLO)]
    whole = (await other_llm.achat(messages)).message.content
    pieces = [piece.delta or "" async for piece in await other_llm.astream_chat(messages)]
    assert "".join(pieces) == whole


def test_other_apis_tools(other_llm: Any) -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = other_llm.chat_with_tools([tool], user_msg=HELLO, tool_required=True)
    (call, *_) = other_llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"] in ("Paris", "Rome")


def test_other_apis_structured(other_llm: Any) -> None:
    assert isinstance(other_llm.as_structured_llm(Mood).complete(HELLO).raw, Mood)
