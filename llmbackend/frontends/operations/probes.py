"""Probes: readiness asked of backends without blocking, and the paths of vLLM's server that probes and dashboards use.

For: the HTTP application, KServe's health endpoints and gRPC's health service. Does not know: why a model is not ready,
what is counted. Invariant: an answer is never older than the request for it, so a client that has loaded a model finds
it loaded.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from typing_extensions import TypedDict  # pydantic takes typing's only from Python 3.12 on

from llmbackend import __version__
from llmbackend.core.errors import unavailable
from llmbackend.core.host_protocol import Host
from llmbackend.core.kept_threads import KeptThreads
from llmbackend.core.messages import ModelIndex

from ..http.errors import error_response
from ..http.responses import TEXT, plain
from ..http.routing import Count, Endpoints, get, post
from ..inference_gate import InferenceGate
from .metrics import PROMETHEUS_TEXT, metrics_page

T = TypeVar("T")


class Version(TypedDict):
    version: str


class Load(TypedDict):
    server_load: Count


class ReadinessProbes:
    """Questions that may wait for a backend: readiness, and the index, which shows it. One object per event loop.

    Each question is asked on one thread at a time, so many probes of a slow model cost one thread, and nothing else
    waits for a model that hangs."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._threads = KeptThreads("readiness-probe")
        weakref.finalize(self, self._threads.close)
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}
        self._next: dict[Hashable, asyncio.Future[Any]] = {}
        """For questions that came while the same one was being asked: it is asked once more for all of them."""

    async def server_is_ready(self) -> bool:
        return await self._answer("server", self._server.is_ready)

    async def model_is_ready(self, name: str, version: int) -> bool:
        return await self._answer((name, version), lambda: self._server.model_is_ready(name, version))

    async def repository_index(self, ready_only: bool) -> list[ModelIndex]:
        return await self._answer(("index", ready_only), lambda: self._server.repository_index(ready_only))

    async def _answer(self, question: Hashable, ask: Callable[[], T]) -> T:
        before = self._under_way.get(question)
        if before is None:
            return await asyncio.shield(self._start(question, ask))
        following = self._next.get(question)
        if following is None:
            following = self._next[question] = asyncio.ensure_future(self._after(before, question, ask))
        answer: T = await asyncio.shield(following)
        return answer

    async def _after(self, before: asyncio.Future[Any], question: Hashable, ask: Callable[[], T]) -> T:
        await asyncio.wait([before])
        del self._next[question]
        answer: T = await asyncio.shield(self._under_way.get(question) or self._start(question, ask))
        return answer

    def _start(self, question: Hashable, ask: Callable[[], T]) -> asyncio.Future[T]:
        answer = self._under_way[question] = asyncio.wrap_future(self._on_a_thread(ask))
        answer.add_done_callback(lambda _: self._under_way.pop(question))
        return answer

    def _on_a_thread(self, ask: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(ask())
            except BaseException as error:
                future.set_exception(error)

        try:
            self._threads.run(run)
        except RuntimeError as error:
            future.set_exception(unavailable(f"the server cannot be asked whether it is ready: {error}"))
        return future


class ProbeEndpoints(Endpoints):
    """The paths of vLLM's server for probes. /health, /health/ready and /ping say what /v2/health/ready says, in vLLM's
    statuses.

    Source: vLLM's api_server (/health, /ping, /version, /load), /health/ready of Triton's OpenAI frontend."""

    statuses = (503,)

    def __init__(self, gate: InferenceGate) -> None:
        self._gate = gate
        self._probes = ReadinessProbes(gate.server)

    @get("/health", "/health/ready", "/ping", response_class=Response)
    @post("/ping", response_class=Response)  # SageMaker's probe
    async def health(self, request: Request) -> Response:
        """Does the server take work?"""
        server = self._gate.server
        if server.is_exiting or not await self._probes.server_is_ready():
            return error_response(unavailable("Server exiting" if server.is_exiting else "not ready"), TEXT)
        return plain()

    @get("/version")
    async def version(self, request: Request) -> Version:
        """The server's release"""
        return {"version": __version__}

    @get("/load")
    async def load(self, request: Request) -> Load:
        """How many inferences run, over all protocols"""
        return {"server_load": self._gate.open_inferences}


class MetricsEndpoint(Endpoints):
    """What the metrics port shows, on this port. Source: vLLM's api_server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    @get("/metrics", response_class=PlainTextResponse)
    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus' text format"""
        return plain(await metrics_page(self._registry), content_type=PROMETHEUS_TEXT)
