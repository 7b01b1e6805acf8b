"""Runs the real endpoints over the real host, on an event loop in a background thread and on free ports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop
from kserve_scripted import start_host

from llmbackend.frontends.http_app import DEFAULT_MAX_INPUT_SIZE_BYTES, create_http_app
from llmbackend.frontends.serving import FrontendServer


class Running:
    """A started host with its endpoints. `call` runs a coroutine on their loop."""

    def __init__(self, root: Path, max_input_size_bytes: int = DEFAULT_MAX_INPUT_SIZE_BYTES) -> None:
        self.host = start_host(root)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="frontends", daemon=True)
        self._thread.start()
        self.frontend: FrontendServer = self.call(self._start(max_input_size_bytes))
        self.http = f"127.0.0.1:{self.frontend.http_port}"
        self.grpc = f"127.0.0.1:{self.frontend.grpc_port}"
        self.metrics = f"127.0.0.1:{self.frontend.metrics_port}"

    async def _start(self, max_input_size_bytes: int) -> FrontendServer:
        app = create_http_app(self.host, max_input_size_bytes=max_input_size_bytes)
        frontend = FrontendServer(self.host, http_port=0, grpc_port=0, metrics_port=0, http_app=app)
        await frontend.start()
        return frontend

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float = 30) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def stop(self, grace_s: float = 5) -> None:
        self.call(self.frontend.stop(grace_s))
        self.call(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        assert self.host.stop(10), "the host still held requests"
