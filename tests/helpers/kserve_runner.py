"""Runs the real endpoints over the real host, on an event loop in a background thread and on free ports."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import uvloop

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import ServerLog
from llmbackend.frontends.access.access_control import AccessControl
from llmbackend.frontends.anthropic.router import create_anthropic_router
from llmbackend.frontends.context import DEFAULT_MAX_INPUT_SIZE_BYTES, FrontendContext
from llmbackend.frontends.http_app import create_http_app
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.journals.idempotency import IdempotentRequests
from llmbackend.frontends.journals.kept_answers import KeptAnswers
from llmbackend.frontends.journals.resumable_streams import ResumableStreams
from llmbackend.frontends.journals.store_settings import IdempotencyLimits
from llmbackend.frontends.limits import FrontendLimits
from llmbackend.frontends.openai.router import create_openai_router
from llmbackend.frontends.operations.router import create_operations_router
from llmbackend.frontends.protocol_options import ProtocolOptions
from llmbackend.server.frontend_server import FrontendServer
from llmbackend.server.ports import Endpoint
from tests.helpers.kserve_scripted import start_host
from tests.helpers.waiting import eventually

FREE_PORT = Endpoint("127.0.0.1", 0)
NO_PORT = Endpoint("127.0.0.1", 0, enabled=False)


class Running:
    """A started host with its endpoints. `call` runs a coroutine on their loop."""

    def __init__(
        self,
        root: Path,
        max_input_size_bytes: int = DEFAULT_MAX_INPUT_SIZE_BYTES,
        limits: FrontendLimits | None = None,
        start: Callable[..., InferenceServer] = start_host,
        protocols: ProtocolOptions | None = None,
        access: AccessControl | None = None,
        streams: ResumableStreams | None = None,
        idempotent: IdempotentRequests | None = None,
        **options: Any,
    ) -> None:
        self.idempotent = idempotent or IdempotentRequests(IdempotencyLimits(), KeptAnswers(5))
        self.streams = streams or ResumableStreams()
        self.access = access
        self.host = start(root, **options)
        self.protocols = protocols or ProtocolOptions()
        self.log = ServerLog()
        self.limits = limits or FrontendLimits()
        self.gate = InferenceGate(self.host, self.limits.inference)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="frontends", daemon=True)
        self._thread.start()
        self.is_stopped = False
        self.frontend: FrontendServer = self.call(self._start(max_input_size_bytes))
        self._idle_tasks = self.call(_task_count()) - 1
        self.http = f"127.0.0.1:{self.frontend.http_port}"
        self.grpc = f"127.0.0.1:{self.frontend.grpc_port}"
        self.metrics = f"127.0.0.1:{self.frontend.metrics_port}"

    async def _start(self, max_input_size_bytes: int) -> FrontendServer:
        context = self.context = FrontendContext.of(
            self.host,
            gate=self.gate,
            access=self.access,
            limits=self.limits,
            log=self.log,
            options=self.protocols,
            streams=self.streams,
            max_input_size_bytes=max_input_size_bytes,
            max_body_bytes=max_input_size_bytes,
        )
        routers = [
            create_anthropic_router(context),
            create_openai_router(context),
            create_operations_router(self.host, self.gate, context.access),
        ]
        self.app = create_http_app(context, routers, self.idempotent)
        frontend = FrontendServer(context, self.app, http=FREE_PORT, grpc=FREE_PORT, metrics=FREE_PORT)
        await frontend.start()
        return frontend

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float = 30) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def stop(self, grace_s: float = 5) -> None:
        self.is_stopped = True
        self.call(self.frontend.stop(grace_s))
        self.call(self.streams.close())
        self.call(self.idempotent.close())
        self.call(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        assert self.host.stop(10), "the host still held requests"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_for_connections(self, count: int, timeout_s: float = 10) -> None:
        """Until that many HTTP requests have begun."""
        eventually(lambda: self.call(_task_count()) - self._idle_tasks - 1 >= count, timeout_s)

    def wait_until_nothing_is_open(self, timeout_s: float = 10) -> None:
        """Until no inference is open and only the tasks of an idle server are left."""
        eventually(
            lambda: not self.gate.open_inferences and self.call(_task_count()) <= 1 + self._idle_tasks, timeout_s
        )


async def _task_count() -> int:
    return len(asyncio.all_tasks())
