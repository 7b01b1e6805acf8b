"""What engines report while they load, as records of the logger of `engine.load_progress`.

For: the start of the server process, and the bars that it shows. Does not know: what is done with a report. Invariant:
the logger is as it was when nobody listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

from llmbackend.engine.start.load_progress import logger as progress_log

from .process_end import in_thread

ORDER_TIMEOUT_S = 2.0
"""Models without an engine report nothing."""


@contextlib.contextmanager
def handled_by(handler: logging.Handler) -> Iterator[None]:
    """Gives each report to `handler` until the block ends."""
    level = progress_log.level
    progress_log.addHandler(handler)
    progress_log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        progress_log.removeHandler(handler)
        progress_log.setLevel(level)


class _FirstReport(logging.Handler):
    """Sets `event`, from any thread."""

    def __init__(self, event: asyncio.Event) -> None:
        super().__init__()
        self._event = event
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._event.set)


async def begin_load(load: Callable[[], None]) -> asyncio.Future[None]:
    """Runs `load` on a thread; returns when it has ordered an engine or has ended, or when ORDER_TIMEOUT_S are over.

    Until then the interpreter lock is the load's: what the caller does next would delay the engine's start."""
    ordered = asyncio.Event()
    with handled_by(_FirstReport(ordered)):
        loading = in_thread(load)
        waiting = asyncio.ensure_future(ordered.wait())
        await asyncio.wait((loading, waiting), timeout=ORDER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    return loading
