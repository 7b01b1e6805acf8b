"""What this server answers on HTTP: GET /openapi.json, an OpenAPI 3.1 document of everything, and GET /, a few lines.

For: people, client generators, the fuzzer. Does not know: handlers. Invariant: the document's paths are the routes of
the application: a route without a description cannot be built into a document (KeyError), so that a test of the
document finds it. What a path means is described beside its handlers, in `kserve/openapi.py`, `openai/openapi.py`,
`anthropic/openapi.py`, `operations/probes.py` and `operations/router.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from llmbackend import __version__

from .access.permissions import OPEN_PATHS
from .anthropic import openapi as openapi_anthropic
from .http.errors import is_anthropic, is_openai
from .http.openapi_parts import Json, operation, plain_response, refusals
from .http.responses import JSON, TEXT, plain
from .http.routing import Router
from .kserve import openapi as openapi_kserve
from .openai import openapi as openapi_openai
from .operations import probes
from .operations import router as operations

PATH: Final = "/openapi.json"
ROOT: Final = "/"
_OPERATIONS: Final = (
    openapi_kserve.OPERATIONS
    | openapi_openai.OPERATIONS
    | openapi_anthropic.OPERATIONS
    | probes.OPERATIONS
    | operations.OPERATIONS
    | {
        ("GET", ROOT): operation("What to ask this server for", {"200": plain_response("A line per path.", TEXT)}),
        ("GET", PATH): operation("This document", {"200": plain_response("OpenAPI 3.1.", JSON)}),
    }
)
_FIRST_PATHS: Final = (
    ("GET", "/v2/health/ready", "200 while the server takes requests"),
    ("POST", "/v2/repository/index", "the models and their states"),
    ("POST", "/v2/models/{model}/generate", "a whole answer (KServe v2; so are infer and gRPC)"),
    ("POST", "/v2/models/{model}/generate_stream", "an answer as server-sent events"),
    ("GET", "/v1/models", "the models (OpenAI)"),
    ("POST", "/v1/chat/completions", "a chat (OpenAI)"),
    ("POST", "/v1/responses", "a response (OpenAI)"),
    ("POST", "/v1/messages", "a message (Anthropic)"),
    ("GET", "/metrics", "metrics (Prometheus)"),
    ("GET", PATH, "every path and its fields"),
)
"""What a person who has only the address should ask for; those paths are shown that are served."""
_VARIANTS: Final = ("/versions/{version}", "/{repository}", "/region/{region}")
"""Optional parts of a path; such a path has the operation of the path without them."""

_PARAMETERS: Final[dict[str, Json]] = {
    "name": {"type": "string", "minLength": 1},
    "model": {"type": "string", "minLength": 1},
    "response_id": {"type": "string", "minLength": 1},
    "conversation_id": {"type": "string", "minLength": 1},
    "item_id": {"type": "string", "minLength": 1},
    "version": {"type": "string", "pattern": "^[0-9]{1,18}$"},
    "repository": {"type": "string", "minLength": 1, "description": "Accepted by the index alone."},
    "region": {"type": "string", "minLength": 1, "description": "Without it: every region."},
    "request": {"type": "string", "pattern": "^[0-9]{1,18}$"},
    "instance": {"type": "string", "minLength": 1},
}
_BEFORE_THE_OPERATION: Final = (401, 403, 408, 413, 429, 431)
"""Statuses that access control and the connection may send before an operation sees its request."""
_KEY_SCHEME: Final = {"apiKey": {"type": "http", "scheme": "bearer", "description": "Where the server asks for keys."}}
_CONVERTER: Final = re.compile(r"\{(\w+):\w+\}")
_VARIABLE: Final = re.compile(r"\{\w+\}")
_CATCH_ALL: Final = frozenset({"/v1/{path}", "/v1/messages/{path}"})
"""Routes that refuse every request, with 404 or 501."""


def create_openapi_router(routers: Sequence[Router]) -> Router:
    """A router that serves both documents of `routers` and of itself, made on the first request."""
    own = Router()
    made: list[bytes] = []

    async def serve_root(request: Request) -> Response:
        return plain(_first_lines([*routers, own]).encode(), content_type=TEXT)

    async def serve(request: Request) -> Response:
        if not made:
            made.append(orjson.dumps(document([*routers, own])))
        return plain(made[0], content_type=JSON)

    own.add_handler(ROOT, serve_root, methods=["GET"])
    own.add_handler(PATH, serve, methods=["GET"])
    return own


def _first_lines(routers: Iterable[Router]) -> str:
    served = {
        _VARIABLE.sub("{}", path) for _, path in _documented(route for router in routers for route in router.routes)
    }
    rows = [row for row in _FIRST_PATHS if _VARIABLE.sub("{}", row[1]) in served]
    return "\n".join(
        [f"llmbackend {__version__}", *(f"{method:4} {path:34} {text}" for method, path, text in rows), ""]
    )


def document(routers: Iterable[Router]) -> Json:
    """The document of all routes of `routers`. Raises KeyError for a route that is not described."""
    paths: Json = {}
    for method, path in sorted(_documented(route for router in routers for route in router.routes)):
        paths.setdefault(path, {})[method.lower()] = _operation(method, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmbackend", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": openapi_kserve.SCHEMAS
            | openapi_openai.schemas()
            | openapi_anthropic.schemas()
            | probes.SCHEMAS
            | operations.SCHEMAS,
            "securitySchemes": _KEY_SCHEME,
        },
    }


def _documented(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """(method, path) of each route that is documented."""
    for route in routes:
        assert isinstance(route, Route)
        path = _CONVERTER.sub(r"{\1}", route.path)
        if path not in _CATCH_ALL:
            yield from ((method, path) for method in (route.methods or ()) if method != "HEAD")


def _operation(method: str, path: str) -> Json:
    plain_path = path
    for variant in _VARIANTS:
        plain_path = plain_path.replace(variant, "")
    described: Json = dict(_OPERATIONS[method, plain_path])
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": _PARAMETERS[name]}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    if in_path:
        described["parameters"] = [*in_path, *described.get("parameters", ())]
    described["responses"] = refusals(_error_schema(path), *_BEFORE_THE_OPERATION) | described["responses"]
    described["security"] = [] if path in OPEN_PATHS else [{}, {"apiKey": []}]
    return described | {"operationId": f"{method} {path}"}


def _error_schema(path: str) -> str:
    if is_anthropic(path):
        return "AnthropicError"
    return "OpenAIError" if is_openai(path) else "Error"
