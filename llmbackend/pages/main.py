"""`python -m llmbackend.pages.main`: the page process, which the server starts for the first viewer.

Started by frontends/page_proxy. Independent of the server; it has one socket to listen on and one to the API.
Invariants: it ends when its standard input, which the server keeps open, closes; it writes no files.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware

_RECONNECT_TIMEOUT_S = 20.0
"""How long the state of a disconnected page is kept."""
_MAX_MESSAGE_BYTES = 4 << 20
"""Limit of a browser's message, which may contain a stored chat (chat/browser_store.py)."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-descriptor", type=int, required=True)
    parser.add_argument("--api-socket", type=Path, required=True)
    options = parser.parse_args()
    _before_nicegui(options.api_socket.parent)
    asyncio.run(_serve(options.socket_descriptor, options.api_socket))


def _before_nicegui(folder: Path) -> None:
    """Sets what NiceGUI reads at import. Nothing is stored, so any folder is suitable; creating a temporary one would
    write a file, and fail on a full disk."""
    tempfile.tempdir = str(folder)
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # NiceGUI would behave differently under a test
    os.environ["NICEGUI_STORAGE_PATH"] = str(folder)  # the default is the working directory


async def _serve(descriptor: int, api_socket: Path) -> None:
    app = make_app(api_socket)
    config = uvicorn.Config(app, lifespan="on", access_log=False, log_level="warning", server_header=False)
    server = uvicorn.Server(config)
    listener = socket.socket(fileno=descriptor)
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _end_with_input)
    await server.serve(sockets=[listener])


def _end_with_input() -> None:
    """Ends the process at once: nothing needs saving, and requests to the API end with their connections."""
    if not os.read(sys.stdin.fileno(), 1):
        os._exit(0)


def make_app(api_socket: Path) -> FastAPI:
    """The application with all pages."""
    from nicegui import app as nicegui_app
    from nicegui import core, ui

    from . import api, routes, security

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with api.connected(api_socket):
            yield

    middleware = [Middleware(GZipMiddleware, minimum_size=1024), Middleware(security.SecurityHeaders)]
    app = FastAPI(lifespan=lifespan, middleware=middleware, openapi_url=None)
    routes.add_to(nicegui_app)
    core.sio.eio.max_http_buffer_size = _MAX_MESSAGE_BYTES
    ui.run_with(
        app,
        title="llmbackend",
        dark=None,
        language="en-US",
        tailwind=False,
        reconnect_timeout=_RECONNECT_TIMEOUT_S,
        gzip_middleware_factory=None,  # the one above is outside of SecurityHeaders, which reads pages
        show_welcome_message=False,
    )
    nicegui_app.config.socket_io_js_transports = ["websocket"]
    return app


if __name__ == "__main__":
    main()
