"""LargeStackExecutor: threads for compilers that call themselves for what is nested.

Independent of what they compute. Invariant: a thread has STACK_BYTES of stack, whatever `ulimit -s` says; this is
address space, of which only the part that was used takes memory.
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
