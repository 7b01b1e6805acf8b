"""Serves the routers of OpenAI's and Anthropic's APIs on a free port, for tests that talk to a host through real
clients and sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.types import ASGIApp

from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.openai.router import create_openai_router


@contextlib.contextmanager
def serve_openai(
    server: Any, store: ResponseStore | None = None, access: AccessControl | None = None, **options: Any
) -> Iterator[str]:
    """Yields the base URL (without /v1). store: of responses and conversations; options: of both routers"""
    shared = {name: value for name, value in options.items() if name != "lora_folder"}
    routers = (create_anthropic_router(server, **shared), create_openai_router(server, store=store, **options))
    app: ASGIApp = Starlette(routes=[route for router in routers for route in router.routes])
    if access is not None:
        app = access.around_http(app, CollectorRegistry())
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=2)
    http_server = uvicorn.Server(config)
    thread = threading.Thread(target=http_server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        http_server.should_exit = True
        thread.join()
        listener.close()
