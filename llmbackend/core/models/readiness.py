"""Asks a backend why a model version is not ready, within bounded time. Source: TRITONBACKEND_ModelInstanceReady.

For: LoadedModel. Does not know: what makes a backend ready. Invariants: an answer takes at most ANSWER_TIMEOUT_S, also
when the backend hangs (Triton then hangs, too); a backend that hangs occupies one thread, not one per question; a
change is logged once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from llmbackend.core.errors import TritonError
from llmbackend.core.kept_threads import KeptThreads

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 6.0


class _Question:
    """One call of the backend, on one of `threads`."""

    def __init__(self, ask: Callable[[], None], threads: KeptThreads) -> None:
        """Raises RuntimeError where there is no thread."""
        self._answered = threading.Event()
        self._reason = ""
        self._deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        threads.run(lambda: self._run(ask))

    def _run(self, ask: Callable[[], None]) -> None:
        try:
            ask()
        except TritonError as error:
            self._reason = error.message or error.status
        self._answered.set()

    @property
    def is_answered(self) -> bool:
        return self._answered.is_set()

    def answer(self, timeout_s: float) -> str:
        """The backend's reason, "" = ready."""
        if self._answered.wait(max(min(self._deadline_s - time.monotonic(), timeout_s), 0.0)):
            return self._reason
        return f"its backend has not said within {timeout_s:g} s whether it is ready"


class Readiness:
    """The readiness of one model version. Any thread."""

    def __init__(self, name: str, version: int) -> None:
        self._name = name
        self._version = version
        self._lock = threading.Lock()
        self._threads = KeptThreads(f"ready-{name}")
        self._question: _Question | None = None
        self._logged = ""
        self._closed = False

    def reason(self, ask: Callable[[], None], timeout_s: float | None = None) -> str:
        """Why the version is not ready; "" when it is. `ask` raises TritonError when it is not ready. It is called on
        another thread, and no reference to it is kept.

        timeout_s: for who cannot wait as long as ANSWER_TIMEOUT_S; no answer within it is no change."""
        with self._lock:
            if self._closed:
                return "it is being unloaded"
            if self._question is None or self._question.is_answered:
                try:
                    self._question = _Question(ask, self._threads)
                except RuntimeError as error:
                    return f"its readiness cannot be checked: {error}"
            question = self._question
        reason = question.answer(ANSWER_TIMEOUT_S if timeout_s is None else timeout_s)
        if timeout_s is None or question.is_answered:
            self._log_change(reason)
        return reason

    def close(self) -> None:
        """Refuses questions and waits for the one under way, so that no finalised instance is asked."""
        with self._lock:
            self._closed = True
            question = self._question
        if question is not None:
            question.answer(ANSWER_TIMEOUT_S)
        self._threads.close()

    def _log_change(self, reason: str) -> None:
        with self._lock:
            if reason == self._logged:
                return
            self._logged = reason
        if reason:
            log.warning("model '%s' version %d is not ready: %s", self._name, self._version, reason)
        else:
            log.info("model '%s' version %d is ready again", self._name, self._version)
