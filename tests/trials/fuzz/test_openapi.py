"""The OpenAPI document says what the application does: its routes, and the fields that its parsers take."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import jsonschema_rs
import orjson
import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.http.errors import OpenAIError
from llmbackend.frontends.http_app import create_http_app
from llmbackend.frontends.openai.requests import parse_chat, parse_completion
from llmbackend.frontends.openai.router import create_openai_router
from llmbackend.frontends.openai.schema import ChatCompletionRequest, CompletionRequest
from llmbackend.frontends.openapi import document

CATCH_ALL = {"/v1/{path:path}", "/v1/messages/{path:path}"}


@pytest.fixture(scope="module")
def app() -> Any:
    server = Mock(InferenceServer, metrics_registry=CollectorRegistry())
    context = FrontendContext.of(server)
    return create_http_app(context, [create_anthropic_router(context), create_openai_router(context)])


@pytest.fixture(scope="module")
def described(app: Any) -> dict[str, Any]:
    text: dict[str, Any] = json.loads(json.dumps(document(app.routes)))
    return text


def test_the_documents_paths_are_the_routes(app: Any, described: dict[str, Any]) -> None:
    served = {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in app.routes
        for method in route.methods or ()
        if method != "HEAD" and route.path not in CATCH_ALL
    }
    assert {(method, path) for path, item in described["paths"].items() for method in item} == served


def test_every_schema_is_json_schema_and_every_reference_resolves(described: dict[str, Any]) -> None:
    for name, schema in described["components"]["schemas"].items():
        jsonschema_rs.meta.validate(schema)
        jsonschema_rs.validator_for({**described, "$ref": f"#/components/schemas/{name}"})


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "m", "prompt": "x"}


@pytest.mark.parametrize(
    ("model", "parse", "least"),
    [(ChatCompletionRequest, parse_chat, CHAT), (CompletionRequest, parse_completion, COMPLETION)],
)
def test_the_documented_fields_are_the_fields_that_are_read(
    model: type[BaseModel], parse: Any, least: dict[str, Any], described: dict[str, Any]
) -> None:
    documented = described["components"]["schemas"][model.__name__]["properties"].keys()
    assert model.model_fields.keys() == documented
    with pytest.raises(OpenAIError, match="unknown field"):
        parse({**least, "no_such_field": None})


VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 0.5, 2**70, "", "x", "auto", "none", "text"),
    *([], [1], ["x"], [[1]], [1, "x"]),
    *({}, {"1": 1}, {"x": 1}, {"1": 101}, {"type": "text"}, {"include_usage": True}),
]
PARTS: list[Any] = [
    {"type": "text", "text": "x"},
    {"type": "text"},
    {"type": "refusal", "refusal": "x"},
    {"type": "text", "text": "x", "more": None},
    {"type": "image_url"},
]
FUNCTION = {"name": "f", "arguments": "{}"}
CALLS: list[Any] = [{"id": "c", "function": FUNCTION}, {"id": "c"}, {"id": "c", "function": FUNCTION, "more": None}]


@pytest.mark.parametrize(
    ("schema", "parse", "least"),
    [("ChatCompletionRequest", parse_chat, CHAT), ("CompletionRequest", parse_completion, COMPLETION)],
)
def test_what_the_document_allows_is_what_is_accepted(
    schema: str, parse: Any, least: dict[str, Any], described: dict[str, Any]
) -> None:
    document = jsonschema_rs.validator_for({**described, "$ref": f"#/components/schemas/{schema}"})
    fields = described["components"]["schemas"][schema]["properties"]
    bodies = [least | {field: value} for field in fields for value in VALUES]
    bodies += [least | {"stream": True, "stream_options": value} for value in VALUES]
    bodies += [least | {"logprobs": value, "top_logprobs": 2, "echo": True} for value in VALUES]
    if schema == "ChatCompletionRequest":
        bodies += [least | {"messages": [message]} for message in messages()]
    for body in bodies:
        assert document.is_valid(body) == is_accepted(parse, body), body


BEYOND_JSON_SCHEMA = {("max_completion_tokens", "min_tokens"), ("max_tokens", "min_tokens"), ("best_of", "n"),
                      ("best_of", "stream"), ("request_id", "store")}  # fmt: skip
"""Pairs of fields of which one bounds or excludes the other."""


@pytest.mark.parametrize(
    ("schema", "parse", "least"),
    [("ChatCompletionRequest", parse_chat, CHAT), ("CompletionRequest", parse_completion, COMPLETION)],
)
def test_two_fields_that_the_document_allows_together_are_accepted_together(
    schema: str, parse: Any, least: dict[str, Any], described: dict[str, Any]
) -> None:
    document = jsonschema_rs.validator_for({**described, "$ref": f"#/components/schemas/{schema}"})
    fields = sorted(described["components"]["schemas"][schema]["properties"].keys() - least.keys())
    sent = {name: [v for v in VALUES if v is not None and document.is_valid(least | {name: v})][:2] for name in fields}
    for first, second in itertools.combinations(fields, 2):
        if (first, second) not in BEYOND_JSON_SCHEMA:
            for values in itertools.product(sent[first], sent[second]):
                body = least | dict(zip((first, second), values, strict=True))
                assert document.is_valid(body) == is_accepted(parse, body), body


def messages() -> Iterator[dict[str, Any]]:
    for role in ("system", "developer", "user", "assistant", "tool", "robot"):
        for content in ({}, *({"content": value} for value in [*VALUES, *([part] for part in PARTS)])):
            yield {"role": role, **content}
            yield {"role": role, "tool_call_id": "c", **content}
        for field in ("name", "refusal", "reasoning", "tool_calls", "audio", "annotations", "function_call", "more"):
            for value in (*VALUES, *([call] for call in CALLS)):
                yield {"role": role, field: value}
                yield {"role": role, "content": "x", field: value}


def is_accepted(parse: Any, body: dict[str, Any]) -> bool:
    try:
        parse(orjson.loads(json.dumps(body)))  # as from the wire, where an integer beyond 64 bits is a float
    except OpenAIError:
        return False
    return True
