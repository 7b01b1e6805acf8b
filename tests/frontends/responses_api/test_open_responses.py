"""Open Responses' compliance suite, rebuilt: its cases by their ids, each answer and event judged by the published
schema (the package `openresponses-types` is generated from it), then by the suite's own conditions.

The suite itself is a script of a repository that no package holds. Of its 17 cases, 7 are about its WebSocket mode and
one is about images, which this server does not have; one looks at no server. A streamed tool call is a case of one of
its branches.
Source: src/lib/compliance-tests.ts of github.com/openresponses/openresponses.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openresponses_types import types
from pydantic import TypeAdapter

from tests.helpers.scripted_text import MODEL, SAY

from .event_reader import events_of

RESPONSE: TypeAdapter[Any] = TypeAdapter(types.ResponseResource)
EVENTS: dict[str, TypeAdapter[Any]] = {
    kind.value: TypeAdapter(event)
    for name, event in vars(types).items()
    if name.endswith("StreamingEvent")
    for kind in event.model_fields["type"].annotation
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
CALL = SAY + '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Rome"}}\n</tool_call>'


def message(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


CASES: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [message("user", f"{SAY}Hello to you.")]},
    "assistant-phase": {
        "input": [
            message("assistant", "I answer with the saved number.") | {"phase": "commentary"},
            message("assistant", "The number is four.") | {"phase": "final_answer"},
            message("user", f"{SAY}four"),
        ]
    },
    "streaming-response": {"input": [message("user", f"{SAY}1, 2, 3, 4, 5")], "stream": True},
    "system-prompt": {"input": [message("system", "Speak as a pirate."), message("user", f"{SAY}Ahoy!")]},
    "tool-calling": {"input": [message("user", CALL)], "tools": [WEATHER]},
    "tool-calling-streaming": {"input": [message("user", CALL)], "tools": [WEATHER], "stream": True},
    "multi-turn": {
        "input": [
            message("user", "My name is Alice."),
            message("assistant", "Hello Alice!"),
            message("user", f"{SAY}Alice"),
        ]
    },
}


def ask(client: openai.OpenAI, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{client.base_url}responses", json={"model": MODEL, "stream": False} | body, timeout=30)


def checked(answer: httpx.Response) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The response, and the events if it was streamed; all of them have the published schema."""
    assert answer.status_code == 200, answer.text
    events: list[dict[str, Any]] = []
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = events_of(answer.content)
        for event in events:
            EVENTS[event["type"]].validate_json(json.dumps(event), strict=True)
    response = events[-1]["response"] if events else answer.json()
    RESPONSE.validate_json(json.dumps(response), strict=True)
    return response, events


@pytest.mark.parametrize("case", CASES)
def test_the_case_passes(client: openai.OpenAI, case: str) -> None:
    response, events = checked(ask(client, CASES[case]))
    assert response["status"] == "completed" and response["output"]
    assert bool(events) == ("stream" in CASES[case])
    if "tools" not in CASES[case]:
        return
    assert "function_call" in {item["type"] for item in response["output"]}
    if events:
        kinds = {(event["type"], event.get("item", {}).get("type")) for event in events}
        assert {
            ("response.output_item.added", "function_call"),
            ("response.function_call_arguments.delta", None),
            ("response.function_call_arguments.done", None),
            ("response.output_item.done", "function_call"),
        } <= kinds


def test_a_background_response_has_the_schema_while_it_is_queued_too(client: openai.OpenAI) -> None:
    response, events = checked(ask(client, CASES["streaming-response"] | {"background": True}))
    assert response["status"] == "completed" and events[0]["response"]["status"] == "queued"


def test_an_image_is_refused_by_name(client: openai.OpenAI) -> None:
    content = [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]
    answer = ask(client, {"input": [message("user", content)]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input[0].content[0].type"


def test_websocket_mode_is_refused_by_name(client: openai.OpenAI) -> None:
    handshake = {
        "connection": "Upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    answer = httpx.get(f"{client.base_url}responses", headers=handshake)
    assert answer.status_code == 501
    assert answer.json()["error"]["message"].startswith("WebSocket mode is not supported")


def test_compact_response_and_compact_missing_model_pass(client: openai.OpenAI) -> None:
    body = {"input": [message("user", f"{SAY}Compact this.")]}
    missing = httpx.post(f"{client.base_url}responses/compact", json=body)
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
    answer = httpx.post(f"{client.base_url}responses/compact", json=body | {"model": MODEL}, timeout=30)
    compacted = types.CompactResource.model_validate_json(answer.content)
    assert compacted.output and answer.json()["output"][-1]["type"] == "compaction"
