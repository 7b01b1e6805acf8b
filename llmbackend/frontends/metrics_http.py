"""The metrics port: GET /metrics in Prometheus' text format.

For: the frontend server. Does not know: what is counted. Invariant: rendering never blocks the event loop (collectors
may ask backends). Source: Triton's metrics server, which answers any other path with an empty 200.
"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from .http_errors import TEXT, error_body, plain
from .prometheus_text import render

PROMETHEUS_TEXT = "text/plain; charset=utf-8"


def create_metrics_app(registry: CollectorRegistry) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":
            response = plain(error_body("Method Not Allowed"), 405, TEXT)
        elif scope["path"] in ("/metrics", "/metrics/"):
            response = plain(await asyncio.to_thread(render, registry), content_type=PROMETHEUS_TEXT)
        else:
            response = plain(content_type=PROMETHEUS_TEXT)
        await response(scope, receive, send)

    return app
