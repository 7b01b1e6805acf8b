"""ReadinessProbes: whether the server and its models are ready, and its index of models, asked off the event loop.

Invariant: an answer is never older than its question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from llmbackend.core.daemon_threads import DaemonThreadPool
from llmbackend.core.errors import unavailable
from llmbackend.core.host_protocol import Host
from llmbackend.core.messages import ModelIndex

T = TypeVar("T")


class ReadinessProbes:
    """Readiness, and the index, which includes it: both may wait for a backend. Used on one event loop.

    Each kind of check runs on one thread at a time, so that many probes of a slow model cost one thread, and nothing
    else waits for a model that hangs.
    """

    def __init__(self, server: Host) -> None:
        self._server = server
        self._threads = DaemonThreadPool("readiness-probe")
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}
        self._next: dict[Hashable, asyncio.Future[Any]] = {}
        """For callers that arrive during a running check: the check is repeated once for all of them."""

    def close(self) -> None:
        """Ends the threads. To be called after the last question."""
        self._threads.close()

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
            future.set_exception(unavailable(f"the readiness of the server is unknown: {error}"))
        return future
