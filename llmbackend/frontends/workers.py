"""Threads and worker processes for work that grows with a request's size.

Independent of what the work is. Invariants: this work never occupies the event loop's default executor; at most WORKERS
processes run, each with one call; a call fails only if a fresh process exits during it; processes end after IDLE_S
without work, with `close`, and with their pool.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, cast

from llmbackend.core.errors import TritonError, unavailable

from .worker_process import receive, to_worker

log = logging.getLogger(__name__)

WORKERS: Final = 2
IDLE_S: Final = 60.0
P = ParamSpec("P")
T = TypeVar("T")
CALL_S: Final = 120
"""Longest time without a byte from the process during a call; parsing 64 MiB of JSON takes ten seconds."""
_MODULE: Final = "llmbackend.frontends.worker_process"


class WorkerPool:
    """`run` and `close` are used on one event loop."""

    def __init__(self) -> None:
        self._threads = WorkThreads(WORKERS, "large-bodies")
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()
        weakref.finalize(self, _close_all, self._all)
        self._calls = 0
        self._retirement: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)` in a worker process.

        The function must be at module level; arguments and result must be small to pickle, except for tensors and
        PickleBuffers, which arrive as bytes. Raises the function's TritonError, or UNAVAILABLE if the process exits.
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
                    log.error("a worker process exited while decoding a large body: %s", error)
                    raise unavailable("the process that decodes large bodies exited on this request") from None
                continue  # the process had exited before the call
            except TritonError:
                self._give_back(worker)
                raise
            except BaseException:  # such as a MemoryError: part of a message may have been read
                self._drop(worker)
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
            raise unavailable(f"no process could be started to decode a large body: {error.strerror}") from None
        with self._lock:
            self._all.add(worker)
        return worker, True

    def _give_back(self, worker: WorkerProcess) -> None:
        with self._lock:
            if worker in self._all:
                self._idle.append(worker)

    def _drop(self, worker: WorkerProcess) -> bool:
        """Ends the process. Returns False if `close` has already done so."""
        worker.close()
        with self._lock:
            is_known = worker in self._all
            self._all.discard(worker)
        return is_known

    def _retire(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._all.difference_update(idle)
        _close_all(idle)

    def close(self) -> None:
        """Ends every process; running calls are lost."""
        if self._retirement is not None:
            self._retirement.cancel()
        with self._lock:
            workers = list(self._all)
            self._all.clear()
            self._idle.clear()
        _close_all(workers)
        self._threads.close()


def _close_all(workers: Iterable[WorkerProcess]) -> None:
    for worker in workers:
        worker.close()


class WorkerLostError(Exception):
    """The process exited during a call, or did not answer in time."""


class WorkerProcess:
    """Serves one call at a time, and none after a WorkerLostError."""

    def __init__(self) -> None:
        """Raises OSError if no process or socket can be created."""
        self._connection, theirs = socket.socketpair()
        timeout = struct.pack("@ll", CALL_S, 0)  # with `settimeout`, MSG_WAITALL would return partial reads
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        command = [sys.executable, "-m", _MODULE, str(theirs.fileno())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C ends the server, not this process
                )
        except BaseException:
            self._connection.close()
            raise

    def call(self, message: Any) -> Any:
        """message: (function, arguments). Blocks. Raises WorkerLostError, and what the function raised."""
        try:
            to_worker(self._connection, message)
            succeeded, result = receive(self._connection)
        except (OSError, EOFError) as error:
            raise WorkerLostError(str(error)) from None
        if not succeeded:
            raise result
        return result

    def close(self) -> None:
        """Kills the process, even during a call. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


class WorkThreads:
    """`count` threads named `name…`, which start with the first call. Used on one event loop."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[P, T], *arguments: P.args, **fields: P.kwargs) -> T:
        """`work(…)` on a thread, with the caller's context variables."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)
        context = contextvars.copy_context()
        call = partial(context.run, partial(work, *arguments, **fields))
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        """Ends the threads once their work is done, without waiting for it. A later `run` starts new threads."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)
