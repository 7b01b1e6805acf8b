"""The OpenAPI document says what the application does: its routes, and the fields that its parsers take."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import jsonschema_rs
import pytest

from llmbackend.core.inference_server import InferenceServer
from llmbackend.frontends import openapi_kserve, openapi_openai
from llmbackend.frontends.http_app import DEFAULT_MAX_INPUT_SIZE_BYTES, create_kserve_router
from llmbackend.frontends.openai import create_openai_router
from llmbackend.frontends.openai.errors import OpenAIError
from llmbackend.frontends.openai.fields import Fields
from llmbackend.frontends.openai.requests import parse_chat, parse_completion
from llmbackend.frontends.openapi import create_openapi_router, document

CATCH_ALL = {"/v1/{path:path}"}


@pytest.fixture(scope="module")
def routers() -> tuple[Any, ...]:
    server = Mock(InferenceServer)
    served = (create_kserve_router(server, DEFAULT_MAX_INPUT_SIZE_BYTES), create_openai_router(server))
    return (*served, create_openapi_router(served))


@pytest.fixture(scope="module")
def described(routers: tuple[Any, ...]) -> dict[str, Any]:
    return json.loads(json.dumps(document(routers)))


def test_the_documents_paths_are_the_routes(routers: tuple[Any, ...], described: dict[str, Any]) -> None:
    served = {
        (method.lower(), route.path.replace(":path}", "}"))
        for router in routers
        for route in router.routes
        for method in route.methods or ()
        if method != "HEAD" and route.path not in CATCH_ALL
    }
    assert {(method, path) for path, item in described["paths"].items() for method in item} == served


def test_nothing_is_described_that_is_not_served(described: dict[str, Any]) -> None:
    operations = openapi_kserve.OPERATIONS.keys() | openapi_openai.OPERATIONS.keys()
    assert {path for _, path in operations} <= described["paths"].keys()


def test_every_schema_is_json_schema_and_every_reference_resolves(described: dict[str, Any]) -> None:
    for name, schema in described["components"]["schemas"].items():
        jsonschema_rs.meta.validate(schema)
        jsonschema_rs.validator_for({**described, "$ref": f"#/components/schemas/{name}"})


@pytest.mark.parametrize(
    ("schema", "parse", "least"),
    [
        ("ChatCompletionRequest", parse_chat, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
        ("CompletionRequest", parse_completion, {"model": "m", "prompt": "x"}),
    ],
)
def test_the_documented_fields_are_the_fields_that_are_read(
    schema: str, parse: Any, least: dict[str, Any], described: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    take = Fields.take
    monkeypatch.setattr(Fields, "take", lambda self, field: (read.append(self.name(field)), take(self, field))[1])
    parse(least)
    documented = described["components"]["schemas"][schema]["properties"].keys()
    assert {field for field in read if "." not in field} == documented
    with pytest.raises(OpenAIError, match="unknown field"):
        parse({**least, "no_such_field": None})
