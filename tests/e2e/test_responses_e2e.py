"""The Responses API of a real server with the bundled model, through the official client: created, streamed, parsed,
with tools that must be called, and a turn behind each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.frontends.responses_api.event_reader import EventReader
from tests.helpers.server_process import ServerProcess

pytestmark = pytest.mark.slow
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CODE: Any = {
    "type": "custom",
    "name": "code",
    "format": {"type": "grammar", "syntax": "regex", "definition": r"[A-Z]{2}-\d{3}"},
}


@pytest.fixture
def client(demo_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{demo_server.http}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def ask(client: openai.OpenAI, **options: Any) -> Any:
    defaults: dict[str, Any] = {"input": "Who are you?", "max_output_tokens": 60, "temperature": 1.0, "store": False}
    options = defaults | options
    return client.responses.create(model="demo", extra_body={"seed": 3}, **options)


def streamed(client: openai.OpenAI, **options: Any) -> dict[str, Any]:
    """The response of a stream that is found to be right."""
    return EventReader().read_all(event.to_dict() for event in ask(client, stream=True, **options))


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_a_text_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = ask(client)
    assert whole.status in ("completed", "incomplete") and whole.usage.output_tokens <= 60
    assert text_of(streamed(client)) == whole.output_text != ""


PERSON = "name is Anna, age is 31"


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)


def test_a_form_that_the_client_parses(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="demo", input=PERSON, text_format=Person, temperature=0, store=False)
    assert parsed.output_parsed == Person(name="Anna", age=31)
    with client.responses.stream(model="demo", input=PERSON, text_format=Person, temperature=0, store=False) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


def test_calls_that_must_be_made_and_the_turn_behind_them(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 200}
    (call, *_) = [item for item in ask(client, **options).output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    (same, *_) = [item for item in streamed(client, **options)["output"] if item["type"] == "function_call"]
    assert (same["name"], same["arguments"]) == (call.name, call.arguments)
    history = [
        {"role": "user", "content": "Who are you?"},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert ask(client, input=history, tools=[WEATHER], tool_choice="none").output_text


def test_a_custom_tool_held_to_its_form(client: openai.OpenAI) -> None:
    choice = {"type": "custom", "name": "code"}
    options: dict[str, Any] = {"tools": [CODE], "tool_choice": choice, "max_output_tokens": 200}
    (item,) = [item for item in streamed(client, **options)["output"] if item["type"] == "custom_tool_call"]
    assert len(item["input"]) == 6 and item["input"][2] == "-"


def test_an_answer_that_was_cut_off_is_gone_on_with(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0, "store": True}
    whole = ask(client, **options).output_text
    cut = ask(client, max_output_tokens=4, **options)
    assert cut.status == "incomplete" and whole.startswith(cut.output_text)
    rest = ask(client, previous_response_id=cut.id, input=[], **options)
    assert cut.output_text + rest.output_text == whole
