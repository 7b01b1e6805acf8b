"""Runs a FrontendServer on an event loop in a background thread, on free ports, for tests with real clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import uvloop

from llmbackend.frontends.serving import FrontendServer


class FrontendThread:
    """A started FrontendServer. `call` runs a coroutine on its loop."""

    def __init__(self, server: Any, **options: Any) -> None:
        self.server = server
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="frontends", daemon=True)
        self._thread.start()
        self.frontend: FrontendServer = self.call(self._start(options))
        self.http = f"127.0.0.1:{self.frontend.http_port}"
        self.grpc = f"127.0.0.1:{self.frontend.grpc_port}"
        self.metrics = f"127.0.0.1:{self.frontend.metrics_port}"

    async def _start(self, options: dict[str, Any]) -> FrontendServer:
        frontend = FrontendServer(self.server, http_port=0, grpc_port=0, metrics_port=0, **options)
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
