"""The event loop of an instance for `async def execute` and `async def is_ready`, on its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class CoroutineLoop:
    """Thread-safe until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-asyncio", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Waits for the coroutine. Returns its value or raises its exception."""
        return self._submit(coroutine).result()

    def start(self, coroutine: Coroutine[Any, Any, Any], on_error: Callable[[BaseException], None]) -> None:
        """Starts the coroutine and returns. `on_error` runs on the loop's thread if it fails or is cancelled."""

        def report(future: Future[Any]) -> None:
            error = asyncio.CancelledError("the model was unloaded") if future.cancelled() else future.exception()
            if error is not None:
                on_error(error)

        self._submit(coroutine).add_done_callback(report)

    def close(self) -> None:
        """Cancels running coroutines and ends the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(_guarded(coroutine), self._loop)


async def _guarded(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Turns SystemExit, which would end the whole loop, into an error of this coroutine."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
