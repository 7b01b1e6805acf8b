"""Serves the routers of OpenAI's and Anthropic's APIs on a free port, for tests that talk to a host through real
clients and sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import openai
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.context import FrontendContext
from llmbackend.frontends.http.endpoint import HttpEndpoint
from llmbackend.frontends.http.protocol import GuardedProtocol
from llmbackend.frontends.http.request_scope import PRESENCE, ClientPresence
from llmbackend.frontends.journals.response_store import ResponseStore
from llmbackend.frontends.limits import HttpLimits
from llmbackend.frontends.openai.router import create_openai_router


@contextlib.contextmanager
def serve_openai(
    server: Any,
    store: ResponseStore | None = None,
    access: AccessControl | None = None,
    *,
    takes_over: bool = False,
    **options: Any,
) -> Iterator[str]:
    """Yields the base URL (without /v1). store: of responses and conversations; takes_over: whether those in it that
    another server has begun are continued; options: of FrontendContext.of"""
    api = FrontendContext.of(server, store=store, **options)
    routers = (create_anthropic_router(api), create_openai_router(api))
    app: ASGIApp = Starlette(routes=[route for router in routers for route in router.routes])
    if access is not None:
        app = access.wrap_http(app, CollectorRegistry())
    with contextlib.closing(api.gate), serve_application(app, store if takes_over else None) as url:
        yield url


@contextlib.contextmanager
def openai_client(server: Any, **options: Any) -> Iterator[openai.OpenAI]:
    """The `openai` client of a server that runs meanwhile. options: of `serve_openai`"""
    with (
        serve_openai(server, **options) as base,
        openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@contextlib.contextmanager
def serve_application(app: ASGIApp, store: ResponseStore | None = None) -> Iterator[str]:
    """Serves `app` on a thread; yields its URL. store: is started and closed"""
    listener = socket.create_server(("127.0.0.1", 0))
    started, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        if store is not None:
            await store.start()
        endpoint = HttpEndpoint(app, listener, lambda: None)
        await endpoint.start(HttpLimits(), GuardedProtocol, 1 << 20)
        started.set()
        await ended.wait()
        await endpoint.stop(2)
        if store is not None:
            await store.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(20)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        listener.close()


def with_presence(app: ASGIApp) -> ASGIApp:
    """`app` for a transport that is no connection of this server: its clients never leave."""

    async def present(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, PRESENCE: ClientPresence()}, receive, send)

    return present
