"""Questions whose answer may wait for a backend: readiness, and the index, which shows it.

For: the frontends, one object for each event loop. Does not know: protocols, why something is not ready. Invariants:
one thread at a time asks each question, so that a storm of probes of a slow model costs one thread, and nothing else
waits for a model that hangs; an answer was asked for after its request came, so that a client which has loaded a
model finds it loaded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import ModelIndex

T = TypeVar("T")


class ReadinessProbes:
    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}
        self._next: dict[Hashable, asyncio.Future[Any]] = {}
        """What those share who asked while the same question was under way: it is asked again after that."""

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
        answer = self._under_way[question] = asyncio.wrap_future(_on_a_thread(ask))
        answer.add_done_callback(lambda _: self._under_way.pop(question))
        return answer


def _on_a_thread(ask: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="readiness-probe", daemon=True).start()
    return future
