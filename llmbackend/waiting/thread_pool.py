"""ThreadPool: a ThreadPoolExecutor for machines that may run out of threads.

Invariant: if `submit` raises, the work never runs. A ThreadPoolExecutor keeps such work in its queue and may run it
later, although its caller was told that it failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPool(ThreadPoolExecutor):
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Raises RuntimeError after `shutdown`, and if no thread can be started."""
        is_accepted: Future[bool] = Future()
        try:
            future = super().submit(_run, is_accepted, fn, args, kwargs)
        except BaseException:
            is_accepted.set_result(False)
            raise
        is_accepted.set_result(True)
        return future


def _run(is_accepted: Future[bool], fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> T:
    if not is_accepted.result():
        raise CancelledError
    return fn(*args, **kwargs)
