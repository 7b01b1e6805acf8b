"""The paths that probes, load balancers and dashboards of vLLM's server ask on the port of inference.

For: the HTTP app. Does not know: models, what is counted. Invariant: /health, /health/ready and /ping say what
/v2/health/ready says, in vLLM's statuses; none of these paths blocks the event loop.
Source: vLLM's api_server (/health, /ping, /version, /load, /metrics), /health/ready of Triton's OpenAI frontend.
"""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from llmbackend import __version__
from llmbackend.core.errors import unavailable

from .http_errors import JSON, TEXT, error_response, plain
from .inference import InferenceGate
from .metrics_http import PROMETHEUS_TEXT
from .openapi_parts import Json, closed, json_response, operation, plain_response, refusals
from .prometheus_text import render


class ProbeEndpoints:
    """has_metrics: whether the metrics page is served here, too."""

    def __init__(self, gate: InferenceGate, has_metrics: bool) -> None:
        self._gate = gate
        self._has_metrics = has_metrics

    def add_to(self, router: APIRouter) -> None:
        router.add_api_route("/health", self.health, methods=["GET"])
        router.add_api_route("/health/ready", self.health, methods=["GET"])
        router.add_api_route("/ping", self.health, methods=["GET", "POST"])  # SageMaker's probe
        router.add_api_route("/version", self.version, methods=["GET"])
        router.add_api_route("/load", self.load, methods=["GET"])
        if self._has_metrics:
            router.add_api_route("/metrics", self.metrics, methods=["GET"])

    async def health(self, request: Request) -> Response:
        """An empty 200 while the server takes work, else 503."""
        server = self._gate.server
        if server.is_exiting or not await asyncio.to_thread(server.is_ready):
            return error_response(unavailable("Server exiting" if server.is_exiting else "not ready"), TEXT)
        return plain()

    async def version(self, request: Request) -> Response:
        return plain(orjson.dumps({"version": __version__}), content_type=JSON)

    async def load(self, request: Request) -> Response:
        """How many inferences run, over all protocols."""
        return plain(orjson.dumps({"server_load": self._gate.open_inferences}), content_type=JSON)

    async def metrics(self, request: Request) -> Response:
        page = await asyncio.to_thread(render, self._gate.server.metrics_registry)
        return plain(page, content_type=PROMETHEUS_TEXT)


_HEALTH = {"200": plain_response("It does.", TEXT)} | refusals("Error", 503)
SCHEMAS: Json = {
    "Version": closed({"version": {"type": "string"}}),
    "Load": closed({"server_load": {"type": "integer", "minimum": 0}}),
}
OPERATIONS: dict[tuple[str, str], Json] = {
    ("GET", "/health"): operation("Does the server take work?", _HEALTH),
    ("GET", "/health/ready"): operation("Does the server take work?", _HEALTH),
    ("GET", "/ping"): operation("Does the server take work?", _HEALTH),
    ("POST", "/ping"): operation("Does the server take work?", _HEALTH),
    ("GET", "/version"): operation("The server's release", {"200": json_response("Version")}),
    ("GET", "/load"): operation("How many inferences run", {"200": json_response("Load")}),
    ("GET", "/metrics"): operation("Metrics", {"200": plain_response("Prometheus' text format.", PROMETHEUS_TEXT)}),
}
