"""Waiting for the effects of another thread, process or task: the only place in the tests that polls.

Used by conditions without an event to wait for. Invariant: a condition that never becomes true fails the test and is
reported.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

TIMEOUT_S = 20.0
POLL_S = 0.005


def eventually(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, _complaint(condition, timeout_s)
        time.sleep(POLL_S)


async def eventually_async(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """The same on an event loop, which goes on meanwhile."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, _complaint(condition, timeout_s)
        await asyncio.sleep(POLL_S)


def _complaint(condition: Callable[[], object], timeout_s: float) -> str:
    what = inspect.getsource(condition).strip() if inspect.isroutine(condition) else repr(condition)
    return f"not within {timeout_s:g} s: {what}"
