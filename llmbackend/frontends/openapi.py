"""/openapi.json, which FastAPI generates from routes and types on the first request, its page /docs, and GET /."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any, Final

import orjson
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, PlainTextResponse
from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from llmbackend import __version__

from .access.permissions import OPEN_PATHS
from .http.responses import JSON, TEXT, plain
from .http.routing import ApiRoute, Endpoints, Json, get

PATH: Final = "/openapi.json"
_FIRST_PATHS: Final = (
    ("GET", "/v2/health/ready", "200 while the server accepts requests"),
    ("POST", "/v2/repository/index", "the models and their states"),
    ("POST", "/v2/models/{model}/generate", "a whole answer (KServe v2, like infer and gRPC)"),
    ("POST", "/v2/models/{model}/generate_stream", "an answer as server-sent events"),
    ("GET", "/v1/models", "the models (OpenAI)"),
    ("POST", "/v1/chat/completions", "a chat (OpenAI)"),
    ("POST", "/v1/responses", "a response (OpenAI)"),
    ("POST", "/v1/messages", "a message (Anthropic)"),
    ("GET", "/metrics", "metrics (Prometheus)"),
    ("GET", PATH, "every path and its fields"),
)
"""Of these, the paths that are served are shown."""
_VARIABLE: Final = re.compile(r"\{\w+\}")
_KEY_SCHEME: Final = {"apiKey": {"type": "http", "scheme": "bearer", "description": "If the server has API keys."}}


class FirstLines(Endpoints):
    """The main paths, for a person who has only the address."""

    def __init__(self, routes: list[BaseRoute]) -> None:
        self._routes = routes

    @get("/", response_class=PlainTextResponse)
    async def first_lines(self, http: Request) -> Response:
        """The main paths of this server"""
        served = {_VARIABLE.sub("{}", route.path_format) for route in self._routes if isinstance(route, Route)}
        rows = [row for row in _FIRST_PATHS if _VARIABLE.sub("{}", row[1]) in served]
        lines = (f"{method:4} {path:34} {text}" for method, path, text in rows)
        return plain("\n".join([f"llmbackend {__version__}", *lines, ""]).encode(), content_type=TEXT)


class DocumentEndpoints(Endpoints):
    """Documents `routes`; its own routes are added to these."""

    def __init__(self, routes: list[BaseRoute], root_path: str = "") -> None:
        """root_path: the prefix that a proxy adds to all paths"""
        self._routes = routes
        self._root_path = root_path
        self._made = b""

    @get(PATH)
    async def document(self, http: Request) -> Response:
        """This document"""
        if not self._made:
            self._made = orjson.dumps(await asyncio.to_thread(document, self._routes, self._root_path))
        return plain(self._made, content_type=JSON)

    @get("/docs", response_class=HTMLResponse)
    async def page(self, http: Request) -> Response:
        """This document as an HTML page, whose scripts the browser loads from jsdelivr.net"""
        return get_swagger_ui_html(openapi_url=f"{self._root_path}{PATH}", title="llmbackend")


def document(routes: Iterable[BaseRoute], root_path: str = "") -> Json:
    served = [route for route in routes if isinstance(route, ApiRoute)]
    made: Json = get_openapi(title="llmbackend", version=__version__, routes=served)
    if root_path:
        made["servers"] = [{"url": root_path}]
    for path, operations in made["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # added by FastAPI
            operation["security"] = [] if path in OPEN_PATHS else [{}, {"apiKey": []}]
    made["components"] = {"schemas": _schemas(served), "securitySchemes": _KEY_SCHEME}
    return made


def _schemas(routes: Iterable[ApiRoute]) -> Json:
    """The components of `routes`, without FastAPI's titles, and with integers, which FastAPI turns into floats."""
    models = enumerate(model for route in routes for model in route.models)
    adapters = [(index, mode, TypeAdapter(model)) for index, (model, mode) in models]
    _, made = TypeAdapter.json_schemas(
        adapters, ref_template="#/components/schemas/{model}", schema_generator=PlainJsonSchema
    )
    schemas: Json = made["$defs"]
    for schema in schemas.values():
        schema.pop("title", None)
    return schemas


class PlainJsonSchema(GenerateJsonSchema):
    """A schema without titles (they repeat names) and defaults (all null). Responses have no additional members."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> Json:
        return self.generate_inner(schema["schema"])

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Json:
        made = super().dataclass_schema(schema)
        made.setdefault("additionalProperties", False)
        return made

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> Json:
        made = super().typed_dict_schema(schema)
        if self.mode == "serialization":
            made.setdefault("additionalProperties", False)
        return made
