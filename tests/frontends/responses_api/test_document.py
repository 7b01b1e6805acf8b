"""What /openapi.json allows of a create-response request is what is accepted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import orjson
import pytest

from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.openai.responses_api.items import ITEM_FORMS
from llmbackend.frontends.openai.responses_api.parsing import parse_responses, read_responses
from llmbackend.frontends.openai.responses_api.schema import ResponsesBody
from llmbackend.frontends.openapi import PlainJsonSchema

LEAST: dict[str, Any] = {"model": "m", "input": "x"}
USER = {"role": "user", "content": "x"}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 0.5, 2**70, "", "x", "auto", "none", "completed", "client"),
    *([], [1], ["x"], [[1]], [1, "x"]),
    *({}, {"1": 1}, {"x": 1}, {"type": "text"}, {"type": "direct"}, {"id": "x"}),
]
PARTS: list[Any] = [
    {"type": "input_text", "text": "x"},
    {"type": "output_text", "text": "x", "annotations": [], "logprobs": None},
    {"type": "refusal", "refusal": "x"},
    {"type": "summary_text", "text": "x"},
    {"type": "reasoning_text", "text": "x"},
    {"type": "input_text"},
    {"type": "input_text", "text": "x", "more": None},
    {"type": "input_text", "text": "x", "more": 1},
    {"type": "input_image", "image_url": "x"},
]
ITEMS: list[dict[str, Any]] = [
    {"type": "message", **USER},
    USER,
    {"type": "reasoning"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "x"},
    {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c", "output": "x"},
    {"type": "tool_search_call", "call_id": "c", "arguments": {}},
    {"type": "tool_search_output", "call_id": "c", "tools": []},
    {"type": "additional_tools", "role": "developer", "tools": []},
]
ITEM_FIELDS = sorted({name for form in ITEM_FORMS.values() for name in form.__annotations__} | {"more"})
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "f"},
    {"type": "tool_search", "execution": "client"},
    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
    {"type": "web_search"},
    {"type": "mcp"},
]
TOOL_FIELDS = ("name", "description", "parameters", "strict", "format", "tools", "execution", "async",
               "allowed_callers", "output_schema", "more")  # fmt: skip


def accepted(body: dict[str, Any]) -> bool:
    try:
        parse_responses(read_responses(orjson.loads(json.dumps(body))))  # as from the wire
    except OpenAIError:
        return False
    return True


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(ResponsesBody.model_json_schema(schema_generator=PlainJsonSchema)))
    return found


@pytest.fixture(scope="module")
def document(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.validator_for(schema)


def bodies_of_items() -> Iterator[dict[str, Any]]:
    for item in ITEMS:
        for field in ITEM_FIELDS:
            # whether a text was sealed here no schema can tell
            values = [None, 1, {}] if field == "encrypted_content" else [*VALUES, *([part] for part in PARTS)]
            yield from (LEAST | {"input": [USER, item | {field: value}]} for value in values)
        for field in item:
            yield LEAST | {"input": [USER, {name: value for name, value in item.items() if name != field}]}


def bodies_of_tools() -> Iterator[dict[str, Any]]:
    yield from (LEAST | {"tools": [value]} for value in VALUES)
    for tool in TOOLS:
        for field in TOOL_FIELDS:
            yield from (LEAST | {"tools": [tool | {field: value}]} for value in VALUES)


def test_each_field(document: Any, schema: dict[str, Any]) -> None:
    for field in schema["properties"]:
        if field in ("previous_response_id", "conversation"):
            continue  # which need a store
        for value in VALUES:
            body = LEAST | {field: value}
            assert document.is_valid(body) == accepted(body), body


@pytest.mark.parametrize("bodies", [bodies_of_items, bodies_of_tools])
def test_items_and_tools(document: Any, bodies: Any) -> None:
    for body in bodies():
        assert document.is_valid(body) == accepted(body), body
