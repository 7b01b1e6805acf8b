"""Threads for work in proportion to a request's size, apart from those that short calls share.

For: InferenceGate and WorkerPool. Does not know: what the work is. Invariant: a health probe or a registration never
waits behind a large request: those use the event loop's own executor, this work never does.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkThreads:
    """`count` threads named `name…`, which start with the first work. Used on one event loop."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[P, T], *arguments: P.args, **fields: P.kwargs) -> T:
        """What `work` returns or raises, called in a thread with the caller's context variables."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)
        context = contextvars.copy_context()
        call = partial(context.run, partial(work, *arguments, **fields))
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def close(self) -> None:
        """Ends the threads once their work is done, without waiting for it. A later `run` starts new ones."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)
