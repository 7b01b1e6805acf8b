"""LargeStackExecutor: threads for recursive compilers, which need more stack the deeper their input nests.

Independent of what they compute. Invariant: each thread has a stack of STACK_BYTES, regardless of `ulimit -s`. That
reserves address space; only the pages that are used take memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
STACK_BYTES: Final = 64 << 20
_lock = threading.Lock()


class LargeStackExecutor(ThreadPoolExecutor):
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Starts a thread if all are busy."""
        with _lock:  # the size is that of all threads that start now
            before_bytes = threading.stack_size(STACK_BYTES)
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                threading.stack_size(before_bytes)
