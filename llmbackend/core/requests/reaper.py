"""A thread that completes what a backend dropped without completing it.

For: handles found dead by `__del__`, which may run on any thread in the middle of any lock, so it must do nothing but
leave a note here. Does not know: requests. Invariant: `submit` never blocks and takes no lock that Python code can
hold (`SimpleQueue.put` is reentrant).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)


class Reaper:
    """Runs submitted actions in order on one daemon thread, between `start` and `stop`."""

    def __init__(self) -> None:
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_acting = False

    @property
    def backlog(self) -> int:
        """How many actions were submitted and have not ended."""
        return self._actions.qsize() + self._is_acting

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="reaper", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Runs what was submitted so far, then ends the thread."""
        if self._thread is not None:
            self._actions.put(None)
            self._thread.join()
            self._thread = None

    def submit(self, action: Callable[[], None]) -> None:
        self._actions.put(action)

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            self._is_acting = True
            try:
                action()
            except Exception:
                log.exception("completing an abandoned request failed")
            self._is_acting = False
            del action  # or the last one would keep its request alive until the next
