"""Waiting for the effects of another thread, process or task: the only place in the tests that polls.

Used by conditions without an event to wait for. Invariant: a condition that never becomes true fails the test and is
reported.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator

from llmbackend.engine.process.engine_process import QUIET_MS

TIMEOUT_S = 20.0
POLL_S = 0.005
MAX_POLL_S = 0.03
"""After a while, since what is asked may cost a server more than the wait."""


def eventually(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    for pause_s in _pauses_s(condition, timeout_s):
        time.sleep(pause_s)


def wait_for_self_check() -> None:
    """An engine checks itself when it has been quiet for a while; its report follows at once."""
    time.sleep(3e-3 * QUIET_MS)


async def eventually_async(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """The same on an event loop, which goes on meanwhile."""
    for pause_s in _pauses_s(condition, timeout_s):
        await asyncio.sleep(pause_s)


def _pauses_s(condition: Callable[[], object], timeout_s: float) -> Iterator[float]:
    deadline_s, pause_s = time.monotonic() + timeout_s, POLL_S
    while not condition():
        assert time.monotonic() < deadline_s, _complaint(condition, timeout_s)
        yield pause_s
        pause_s = min(pause_s * 1.1, MAX_POLL_S)


def _complaint(condition: Callable[[], object], timeout_s: float) -> str:
    what = inspect.getsource(condition).strip() if inspect.isroutine(condition) else repr(condition)
    return f"not within {timeout_s:g} s: {what}"
