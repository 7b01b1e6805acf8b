"""Calls to worker processes: few, started when they are first needed, replaced when they end.

For: InferenceGate. Does not know: what is called. Invariants: no more than WORKERS processes at a time, each with one
call; a call is lost only if a fresh process ends with it, and then it alone ends with an error; processes that have
nothing to do for IDLE_S are ended, so an idle server has none; none is left after `close`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from llmbackend.core.errors import TritonError, unavailable
from llmbackend.frontends.work_threads import WorkThreads

from .process import WorkerLostError, WorkerProcess

log = logging.getLogger(__name__)

WORKERS: Final = 2
IDLE_S: Final = 60.0
T = TypeVar("T")


class WorkerPool:
    """`run` and `close` are used on one event loop."""

    def __init__(self) -> None:
        self._threads = WorkThreads(WORKERS, "large-bodies")
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        self._calls = 0
        self._retirement: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What `function(*arguments)` returns or raises in a worker process.

        The function must be one of a module; arguments and result must be small to pickle but for tensors and
        PickleBuffers, which arrive as bytes. Raises TritonError, UNAVAILABLE also when the process ends over it.
        """
        if self._retirement is not None:
            self._retirement.cancel()
        self._calls += 1
        try:
            return cast(T, await self._threads.run(self._call, (function, arguments)))
        finally:
            self._calls -= 1
            if not self._calls:
                self._retirement = asyncio.get_running_loop().call_later(IDLE_S, self._retire)

    def _call(self, message: Any) -> Any:
        while True:
            worker, is_fresh = self._take()
            try:
                result = worker.call(message)
            except WorkerLostError as error:
                if not self._drop(worker):
                    raise unavailable("Server is stopping") from None
                if is_fresh:
                    log.error("a worker process ended while it decoded a large body: %s", error)
                    raise unavailable("the request ended the process that decodes large bodies") from None
                continue  # it had ended before it was asked
            except TritonError:
                self._give_back(worker)
                raise
            self._give_back(worker)
            return result

    def _take(self) -> tuple[WorkerProcess, bool]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        try:
            worker = WorkerProcess()
        except OSError as error:
            raise unavailable(f"no process can be started to decode a large body: {error.strerror}") from None
        with self._lock:
            self._all.add(worker)
        return worker, True

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if worker in self._all:
                self._idle.append(worker)

    def _drop(self, worker: WorkerProcess) -> bool:
        """False when `close` has ended it."""
        worker.close()
        with self._lock:
            is_known = worker in self._all
            self._all.discard(worker)
        return is_known

    def _retire(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._all.difference_update(idle)
        for worker in idle:
            worker.close()

    def close(self) -> None:
        """Ends every process; calls that run are lost."""
        if self._retirement is not None:
            self._retirement.cancel()
        with self._lock:
            workers, self._all, self._idle = self._all, set(), []
        for worker in workers:
            worker.close()
        self._threads.close()
