"""Metrics in Prometheus' text format, a model's load in a header (ORCA), and health probes, also on vLLM's paths.

Invariants: nothing here blocks the event loop; a request that does not ask for its model's load costs one header
lookup.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from llmbackend import __version__
from llmbackend.core.errors import unavailable
from llmbackend.core.host_protocol import Host

from ..http.errors import error_body, error_response
from ..http.request_scope import header
from ..http.responses import TEXT, plain
from ..http.routing import Count, Endpoints, get, post
from ..inference_gate import InferenceGate

LOOP_DELAY: Final = "llmbackend:event_loop_delay_seconds"
_TYPES: Final = frozenset({"counter", "gauge", "histogram", "summary"})
PROMETHEUS_TEXT: Final = "text/plain; charset=utf-8"
FORMAT_HEADER: Final = b"endpoint-load-metrics-format"
LOAD_HEADER: Final = "endpoint-load-metrics"
KV_CACHE_FAMILY: Final = "nv_trt_llm_kv_cache_block_metrics"
_BLOCK_TYPE: Final = "kv_cache_block_type"


async def metrics_page(registry: CollectorRegistry) -> bytes:
    """The page, including the delay of this event loop, which is measured only here, so that an idle server sleeps."""
    asked_s = time.monotonic()
    await asyncio.sleep(0)  # one turn of the loop
    delay = Metric(LOOP_DELAY, "One round of the event loop that serves the clients, at this scrape.", "gauge")
    delay.add_sample(LOOP_DELAY, {}, time.monotonic() - asked_s)
    return await asyncio.to_thread(render, registry, delay)


def render(registry: CollectorRegistry, *more: Metric) -> bytes:
    """Prometheus' format 0.0.4, with integers without a fraction, as Triton prints them.

    HELP and TYPE have the name of the samples, so that a scraper knows their type: prometheus_client's renderer appends
    `_total` to every counter there, even to Triton's counters without it, like nv_inference_request_success.
    """
    lines: list[str] = []
    for metric in (*registry.collect(), *more):
        name = _family_name(metric)
        kind = metric.type if metric.type in _TYPES else "untyped"
        lines.append(f"# HELP {name} {_escape(metric.documentation)}")
        lines.append(f"# TYPE {name} {kind}")
        for sample in metric.samples:
            if not sample.name.endswith("_created"):
                lines.append(f"{sample.name}{_labels(sample.labels)} {_number(float(sample.value))}")
    return ("\n".join(lines) + "\n").encode()


def _family_name(metric: Metric) -> str:
    """The name of the samples: prometheus_client's Counter `x` has samples `x_total`."""
    total = f"{metric.name}_total"
    is_client_counter = metric.type == "counter" and any(sample.name == total for sample in metric.samples)
    return total if is_client_counter else metric.name


def _labels(labels: Mapping[str, str]) -> str:
    """Labels sorted by name, with a bucket's bound or a quantile last."""
    if not labels:
        return ""
    names = sorted(labels, key=lambda name: (name in ("le", "quantile"), name))
    pairs = ",".join(f'{name}="{_escape(labels[name], quote=True)}"' for name in names)
    return f"{{{pairs}}}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _escape(text: str, quote: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quote else escaped


def create_metrics_app(registry: CollectorRegistry) -> ASGIApp:
    """The application of the metrics port. As in Triton, any other path gets an empty 200."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":
            response = plain(error_body("Method Not Allowed"), 405, TEXT)
        elif scope["path"] in ("/metrics", "/metrics/"):
            response = plain(await metrics_page(registry), content_type=PROMETHEUS_TEXT)
        else:
            response = plain(content_type=PROMETHEUS_TEXT)
        await response(scope, receive, send)

    return app


def load_headers(server: Host, request: Request, model: str) -> dict[str, str]:
    """The load header, if `request` has `endpoint-load-metrics-format: text|json` and the model reports its load.

    Source: Triton's orca_http.cc. Deliberate difference: the load is that of the request's model; Triton reports
    whichever model it reads last.
    """
    style = header(request, FORMAT_HEADER)
    text = _load(server, model, style.lower()) if style else ""
    return {LOAD_HEADER: text} if text else {}


def _load(server: Host, model: str, style: str) -> str:
    if style not in ("text", "json"):
        return ""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for sample in server.metric_samples(KV_CACHE_FAMILY):
        if sample.labels.get("model", model) == model and _BLOCK_TYPE in sample.labels:
            found[sample.labels.get("version", "")][sample.labels[_BLOCK_TYPE]] = sample.value
    versions = [blocks for blocks in found.values() if {"tokens_per", "used", "max"} <= blocks.keys()]
    if not versions:
        return ""
    most = sum(blocks["max"] for blocks in versions)
    utilization = sum(blocks["used"] for blocks in versions) / most if most else 0.0
    capacity = int(sum(blocks["max"] * blocks["tokens_per"] for blocks in versions))
    if style == "json":
        named = {"kv_cache_utilization": utilization, "max_token_capacity": capacity}
        return f"JSON {orjson.dumps({'named_metrics': named}).decode()}"
    prefix = "named_metrics."
    return f"TEXT {prefix}kv_cache_utilization={utilization:f}, {prefix}max_token_capacity={capacity}"


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: Count


class ProbeEndpoints(Endpoints):
    """/health, /health/ready and /ping are /v2/health/ready with vLLM's statuses.

    Sources: vLLM's api_server (/health, /ping, /version, /load), /health/ready of Triton's OpenAI frontend.
    """

    statuses = (503,)

    def __init__(self, gate: InferenceGate) -> None:
        self._gate = gate

    @get("/health", "/health/ready", "/ping", response_class=Response)
    @post("/ping", response_class=Response)  # SageMaker's probe
    async def health(self, request: Request) -> Response:
        """Is the server ready for requests?"""
        server = self._gate.server
        if server.is_exiting or not await self._gate.readiness.server_is_ready():
            return error_response(unavailable("Server exiting" if server.is_exiting else "not ready"), TEXT)
        return plain()

    @get("/version")
    async def version(self, request: Request) -> Version:
        """The server's release"""
        return {"version": __version__}

    @get("/load")
    async def load(self, request: Request) -> Load:
        """The number of running inferences, over all protocols"""
        return {"server_load": self._gate.open_inferences}


class MetricsEndpoint(Endpoints):
    """The metrics page on the HTTP port. Source: vLLM's api_server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    @get("/metrics", response_class=PlainTextResponse)
    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' text format"""
        return plain(await metrics_page(self._registry), content_type=PROMETHEUS_TEXT)
