"""What a model's own `is_ready()` says, asked of its stub process.

For: StubServices. Does not know: processes, what readiness is for. Invariants: the model is asked one question at a
time, whoever asks, and an answer holds for FRESH_S, so that a storm of probes costs the model little; each who asks is
answered within TIMEOUT_S, also when the model hangs or its process ends.
Source: user-defined `is_ready()` of Triton's python backend, and its 5 s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

TIMEOUT_S = 5.0
FRESH_S = 0.1


class StubReadiness:
    """Any thread may ask."""

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` sends the question and returns at once; `answer` follows."""
        self._ask = ask
        self._lock = threading.Lock()
        self._pending: Future[str] | None = None
        self._last: tuple[float, str] | None = None
        self._end: str | None = None

    def reason(self) -> str:
        """Why the model is not ready; "" when it is."""
        with self._lock:
            if self._end is not None:
                return self._end
            if self._last is not None and time.monotonic() - self._last[0] < FRESH_S:
                return self._last[1]
            if self._pending is None:
                self._pending = Future()
                self._ask()
            pending = self._pending
        try:
            return pending.result(TIMEOUT_S)
        except TimeoutError:
            return f"is_ready() has not returned within {TIMEOUT_S:g} s"

    def answer(self, reason: str) -> None:
        """On the thread of the stub's messages."""
        with self._lock:
            self._last = (time.monotonic(), reason)
            pending, self._pending = self._pending, None
        if pending is not None:
            pending.set_result(reason)

    def close(self, reason: str) -> None:
        """The stub is gone."""
        with self._lock:
            self._end = reason
        self.answer(reason)
