"""The thread on which an ensemble starts and stops the steps that a response of another step brings about.

For: the ensemble scheduler. Does not know: what is run. Invariants: actions run in the order in which they came, one at
a time and under no lock of the host, since a response callback, which runs under several, must only enqueue; the thread
is there from the first action on, and gone after `stop`.
Source: the ensemble callback pool of Triton's server, which keeps no order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)


class StepLauncher:
    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    def submit(self, action: Callable[[], None]) -> None:
        """Never blocks. Any thread. After `stop` nothing is left to start or to stop, and the action is dropped."""
        with self._lock:
            if self._is_stopped:
                return
            self._actions.put(action)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"ensemble-{self._name}", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Runs what was submitted so far, and ends the thread."""
        with self._lock:
            self._is_stopped = True
            thread = self._thread
        if thread is not None:
            self._actions.put(None)
            thread.join()

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            try:
                action()
            except Exception:
                log.exception("a step of ensemble '%s' could not be started", self._name)
            del action  # or the last one would keep its request alive until the next
