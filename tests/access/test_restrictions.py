"""Triton's restricted APIs: parsing, and that no endpoint is without a category."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import Route
from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.frontends.access.access_control import HttpAccess
from llmbackend.frontends.access.api_keys import KeyRing, unnamed_keys
from llmbackend.frontends.access.permissions import (
    CATEGORY_OF_RPC,
    NO_RESTRICTIONS,
    OPEN_PATHS,
    OPEN_RPCS,
    Category,
    Restriction,
    Restrictions,
    begins_no_inference,
    category_of,
    needs_operator,
    parse_restrictions,
)
from llmbackend.frontends.access.rate_limit import NO_LIMITS
from llmbackend.frontends.access.request_identity import AccessMetrics
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.http_app import create_http_app
from llmbackend.frontends.openai.router import create_openai_router
from llmbackend.frontends.operations.router import create_operations_router

EVERYTHING = Restrictions({category: Restriction("x-key", b"value") for category in Category})


def test_groups_are_parsed() -> None:
    found = parse_restrictions(["model-repository,health:Admin-Key=a=b:c", "inference:k=v"], "api")
    assert found.of == {
        Category.MODEL_REPOSITORY: Restriction("admin-key", b"a=b:c"),
        Category.HEALTH: Restriction("admin-key", b"a=b:c"),
        Category.INFERENCE: Restriction("k", b"v"),
    }
    assert parse_restrictions(["trace:k=v"], "protocol").of == {
        Category.TRACE: Restriction("triton-grpc-protocol-k", b"v")
    }


@pytest.mark.parametrize(
    ("kind", "items", "text"),
    [
        ("api", ["model-reposit,health:k1=v1"], "unknown restricted api 'model-reposit'"),
        ("protocol", ["model-reposit:k1=v1"], "unknown restricted protocol 'model-reposit'"),
        (
            "api",
            ["model-repository,health:k1=v1", "metadata,health:k2=v2"],
            "restricted api 'health' can not be specified in multiple config groups",
        ),
        (
            "protocol",
            ["health,health:k=v"],
            "restricted protocol 'health' can not be specified in multiple config groups",
        ),
        ("api", ["health"], "--http-restricted-api option format is '<config name>:<setting>=<value>'. Got health"),
        (
            "protocol",
            ["health:k="],
            "--grpc-restricted-protocol option format is '<config name>:<setting>=<value>'. Got health:k",
        ),
        ("api", [":k=secret"], "--http-restricted-api option format is '<config name>:<setting>=<value>'. Got :k"),
    ],
)
def test_texts_are_tritons(kind: str, items: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        parse_restrictions(items, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "category"),
    [
        ("/v2/health/live", Category.HEALTH),
        ("/v2/models/m/ready", Category.HEALTH),
        ("/v2/models/m/versions/1/ready", Category.HEALTH),
        ("/v2", Category.METADATA),
        ("/v2/models/m", Category.METADATA),
        ("/v2/models/m/versions/2", Category.METADATA),
        ("/v2/models/m/config", Category.MODEL_CONFIG),
        ("/v2/models/stats", Category.STATISTICS),
        ("/v2/models/m/versions/2/stats", Category.STATISTICS),
        ("/v2/models/m/infer", Category.INFERENCE),
        ("/v2/models/m/versions/2/generate_stream", Category.INFERENCE),
        ("/v2/repository/index", Category.MODEL_REPOSITORY),
        ("/v2/repository/r/models/m/load", Category.MODEL_REPOSITORY),
        ("/v2/systemsharedmemory/region/r/register", Category.SHARED_MEMORY),
        ("/v2/cudasharedmemory/status", Category.SHARED_MEMORY),
        ("/v2/trace/setting", Category.TRACE),
        ("/v2/models/m/trace/setting", Category.TRACE),
        ("/v2/logging", Category.LOGGING),
        ("/v1/chat/completions", Category.INFERENCE),
        ("/v1/models", Category.MODEL_REPOSITORY),
        ("/v1/models/org/name", Category.MODEL_REPOSITORY),
        ("/v2/engine/settings", Category.LOGGING),
        ("/v2/engine/access", Category.LOGGING),
        ("/v2/engine/requests/17/cancel", Category.INFERENCE),
        ("/v2/engine/instances/m/1/m_0/kill", Category.MODEL_REPOSITORY),
        ("/nothing", None),
    ],
)
def test_categories_of_paths(path: str, category: Category | None) -> None:
    assert category_of(path) is category


def whole_app(server: InferenceServer) -> Starlette:
    """With the routers of a server process."""
    context = FrontendContext.of(server)
    operations = create_operations_router(server, context.gate, context.access)
    return create_http_app(context, (create_anthropic_router(context), create_openai_router(context), operations))


def all_paths(app: Starlette) -> set[str]:
    """One path per route of the application."""
    templates = {route.path for route in app.routes if isinstance(route, Route)}
    return {re.sub(r"\{[^}]*\}", "1", template) for template in templates}


def test_no_route_is_without_a_category_and_no_spelling_of_it_slips_through() -> None:
    server = InferenceServer(ServerOptions())
    app = whole_app(server)
    access = HttpAccess(app, None, EVERYTHING, AccessMetrics(CollectorRegistry()), False)
    paths = all_paths(app)
    assert len(paths) > 30

    async def statuses() -> dict[str, int]:
        spellings = [f"{path}{end}" for path in paths for end in ("", "%0A", "/", "?x=1", "%2F", "%00")]
        transport = httpx.ASGITransport(access, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://access") as client:
            found = {}
            for spelling in spellings:
                for method in ("GET", "POST"):
                    found[f"{method} {spelling}"] = (await client.request(method, spelling)).status_code
            return found

    found = asyncio.run(statuses())
    assert all(found[f"GET {path}"] == found[f"POST {path}"] == 403 for path in paths)
    assert {request: status for request, status in found.items() if status not in (403, 404)} == {}


def test_no_spelling_of_an_operators_path_lets_a_user_in() -> None:
    server = InferenceServer(ServerOptions())
    app = whole_app(server)
    keys, counted = KeyRing(unnamed_keys(["key"], NO_LIMITS)), AccessMetrics(CollectorRegistry())
    access = HttpAccess(app, keys, NO_RESTRICTIONS, counted, False)
    operators = {path for path in all_paths(app) if needs_operator(path, category_of(path))}
    others = all_paths(app) - operators - {"/load"}  # of vLLM: a number that users may see
    assert "/v2/engine/requests/1/cancel" in others  # of a user's own requests
    assert {"/v2/logging", "/v2/trace/setting", "/v2/models/1/trace/setting"} <= operators
    assert {path for path in others if re.search("load|logging|setting|sharedmemory", path)} == set()
    of_adapters = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert {path for path in operators if re.search("infer|generate|index|stop|v1", path)} == of_adapters
    assert len(operators) >= 16

    async def statuses() -> dict[str, int]:
        transport = httpx.ASGITransport(access, raise_app_exceptions=False)
        headers = {"authorization": "Bearer key"}
        async with httpx.AsyncClient(transport=transport, base_url="http://access", headers=headers) as client:
            return {
                f"{method} {path}{end}": (await client.request(method, f"{path}{end}")).status_code
                for path in operators
                for end in ("", "%0A", "?x=1", "/", "%2F", "%00", "%0A%0A")
                for method in ("GET", "POST")
            }

    found = asyncio.run(statuses())
    assert all(found[f"{method} {path}"] == 403 for path in operators for method in ("GET", "POST"))
    assert set(found.values()) <= {403, 404}


def test_every_rpc_has_a_category() -> None:
    services = [
        pb.DESCRIPTOR.services_by_name["GRPCInferenceService"],
        health_pb2.DESCRIPTOR.services_by_name["Health"],
    ]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    known = set(CATEGORY_OF_RPC)
    assert methods - known <= {"/grpc.health.v1.Health/List"}  # not served
    assert set(CATEGORY_OF_RPC.values()) == set(Category)


def test_what_is_open_is_health_alone() -> None:
    assert {category_of(path) for path in OPEN_PATHS} == {Category.HEALTH}
    assert {CATEGORY_OF_RPC[method] for method in OPEN_RPCS} == {Category.HEALTH}


def test_reading_a_response_later_begins_no_inference() -> None:
    assert begins_no_inference("/v1/responses/resp_1") and begins_no_inference("/v1/responses/resp_1/cancel")
    assert begins_no_inference("/v1/chat/completions/chatcmpl-1") and not begins_no_inference("/v1/chat/completions")
    assert not begins_no_inference("/v1/chat/completions/render") and not begins_no_inference("/v1/responses/compact")
    assert not begins_no_inference("/v1/responses") and not begins_no_inference("/v1/responses/input_tokens")


@pytest.mark.parametrize(
    ("path", "last_event_id", "begins_none"),
    [
        ("/v1/chat/completions", b"a:1", True),
        ("/v1/completions", b"17", True),
        ("/v2/models/m/versions/1/generate_stream", b"a", True),
        ("/invocations", b"a:1", True),
        ("/v1/completions", b" ", False),
        ("/v1/completions", b"\xa0", False),
        ("/v2/models/m/generate", b"a", False),
        ("/v1/responses", b"a", False),
    ],
)
def test_resuming_a_stream_begins_no_inference(path: str, last_event_id: bytes, begins_none: bool) -> None:
    assert begins_no_inference(path, last_event_id) is begins_none
