"""Formats with reasoning, content in markers and tagged calls, streamed over every API through its real client: each
tells the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import anthropic
import openai
import pytest

from tests.helpers.openai_live_server import serve_openai
from tests.helpers.scripted_text import MODEL, SAY, host_of_scripts

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
DSML = (
    "<think>Paris first.</think>I look.\n\n<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris é</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
KIMI_K3 = (
    "<|open|>think<|sep|>Paris first.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris é<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
SCRIPTS = {"deepseek_v4": DSML, "kimi_k3": KIMI_K3}
REASONING, CONTENT, ARGUMENTS = "Paris first.", "I look.", {"city": "Paris é", "days": 2}


@dataclass(frozen=True, slots=True)
class Served:
    base: str
    script: str


@pytest.fixture(scope="module", params=list(SCRIPTS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parsers = {"tool_call_parser": request.param, "reasoning_parser": request.param}
    with (
        host_of_scripts(tmp_path_factory.mktemp("repository"), **parsers) as host,
        serve_openai(host) as base,
    ):
        yield Served(base, SCRIPTS[request.param])


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, script: str, **fields: Any) -> Any:
    function: Any = {"name": "get_weather", "parameters": SCHEMA}
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": SAY + script}],
        tools=[{"type": "function", "function": function}],
        **{"temperature": 0, "max_tokens": 600, **fields},
    )


def test_chat_completions(client: openai.OpenAI, served: Served) -> None:
    reasoning = content = arguments = ""
    names, finish_reasons = [], []
    for choice in (chunk.choices[0] for chunk in chat(client, served.script, stream=True) if chunk.choices):
        reasoning += (choice.delta.model_extra or {}).get("reasoning") or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            names += [call.function.name] if call.function.name else []
            arguments += call.function.arguments or ""
        finish_reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (reasoning, content.strip(), names) == (REASONING, CONTENT, ["get_weather"])
    assert json.loads(arguments) == ARGUMENTS
    assert finish_reasons == ["tool_calls"]


def test_responses(client: openai.OpenAI, served: Served) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
    stream: Any = client.responses.create(
        model=MODEL, input=SAY + served.script, tools=cast(Any, [tool]), stream=True, store=False
    )
    events = list(stream)
    kinds = {event.type for event in events}
    assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= kinds
    reasoning, message, call = events[-1].response.output
    assert reasoning.content[0].text == REASONING
    assert message.content[0].text.strip() == CONTENT
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments


def test_messages(served: Served) -> None:
    with (
        anthropic.Anthropic(base_url=served.base, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model=MODEL,
            max_tokens=600,
            messages=[{"role": "user", "content": SAY + served.script}],
            tools=[{"name": "get_weather", "input_schema": SCHEMA}],
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream,
    ):
        message = stream.get_final_message()
    shown = json.loads(message.to_json())["content"]
    assert [block["type"] for block in shown] == ["thinking", "text", "tool_use"]
    thinking, text, call = shown
    assert (thinking["thinking"], text["text"].strip()) == (REASONING, CONTENT)
    assert (call["name"], call["input"]) == ("get_weather", ARGUMENTS)
    assert message.stop_reason == "tool_use"
