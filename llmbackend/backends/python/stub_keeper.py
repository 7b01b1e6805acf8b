"""Keeps one instance's stub process: starts it, starts it again when it dies, ends it.

For: InstanceState. Does not know: requests, what a stub does. Invariants: at most one stub serves at a time; one that
dies after it served is followed by another at once, one that did nothing after a pause that grows; whoever asks for the
stub waits while it is being started, and is refused, with the cause, while it can not be.
Source: ours. Triton's python backend answers `Stub process '…' is not healthy.` from then on, and starts nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from llmbackend.core.backend_api import TritonError, unavailable

from .error_messages import not_healthy
from .stub_process import StubDeadError, StubRaisedError
from .stub_services import StubServices

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
READY_PATIENCE_S = 2.0
"""A stub that is being started again for longer than this makes its model not ready."""


class StubKeeper:
    """Any thread may ask; `start` and `close` are for the instance's owner."""

    def __init__(self, name: str, launch: Callable[[], StubServices], prepare: Callable[[StubServices], None]) -> None:
        """`prepare` makes a launched stub ready to execute; it raises TritonError when that fails."""
        self._name = name
        self._launch = launch
        self._prepare = prepare
        self._changed = threading.Condition()
        self._stub: StubServices | None = None
        self._is_ready = False
        self._is_closed = False
        self._has_served = False
        self._failure = ""
        self._down_since_s = 0.0
        self._pause_s = 0.0
        self._restarter: threading.Thread | None = None

    def start(self, spare: StubServices | None) -> None:
        """The first life, in `spare` if there is one. Raises TritonError when it does not become ready."""
        try:
            self._begin(spare)
        except BaseException:
            self._is_closed = True
            raise

    def get(self) -> StubServices:
        """The stub, once it is ready. Raises TritonError UNAVAILABLE while it can not be started."""
        if self._is_ready and self._has_served and self._stub is not None:
            return self._stub  # it may die the next moment in any case
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._failure or self._is_closed)
            if not self._is_ready or self._stub is None:
                raise self._not_available()
            self._has_served = True
            return self._stub

    def check_ready(self) -> None:
        """Raises TritonError UNAVAILABLE when requests would be refused, or wait for long, or when the model says that
        it is not ready; that may take as long as it takes the model."""
        with self._changed:
            is_patient = not self._failure and time.monotonic() - self._down_since_s < READY_PATIENCE_S
            if not self._is_ready and not is_patient:
                raise self._not_available()
            stub = self._stub if self._is_ready else None
        if stub is not None and (reason := stub.not_ready_reason()):
            raise unavailable(f"instance '{self._name}': {reason}")

    def close(self, timeout_s: float) -> None:
        """Lets the model finalize, and ends the process; by force after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            was_ready, self._is_ready, self._is_closed = self._is_ready, False, True
            if not was_ready and self._stub is not None:
                self._stub.process.kill()
            self._changed.notify_all()
        if self._restarter is not None:
            self._restarter.join()
        if self._stub is None:
            return
        if was_ready:
            self._finalize(self._stub, timeout_s)
        self._stub.process.close(max(deadline_s - time.monotonic(), 0.0))

    def _finalize(self, stub: StubServices, timeout_s: float) -> None:
        try:
            stub.process.call("finalize", None, timeout_s=timeout_s)
        except StubRaisedError as error:
            log.error("finalize of instance '%s' failed: %s", self._name, error)
        except TimeoutError:
            log.error("finalize of instance '%s' took longer than %g s; its process is killed", self._name, timeout_s)
            stub.process.kill()
        except StubDeadError as error:
            log.error("the process of instance '%s' ended before it was finalized. %s", self._name, error)

    def _begin(self, stub: StubServices | None) -> None:
        """Raises TritonError when the stub does not become ready; then it is gone."""
        stub = stub or self._launch()
        stub.process.name = self._name
        stub.process.on_end = partial(self._on_end, stub)
        with self._changed:
            self._stub = stub
            if self._is_closed:
                stub.process.kill()
        try:
            self._prepare(stub)
        except BaseException:
            stub.process.close(0.0)
            raise
        with self._changed:
            if stub.is_abandoned:
                raise not_healthy(self._name, stub.process.cause)
            self._has_served, self._failure, self._is_ready = False, "", True
            self._changed.notify_all()

    def _on_end(self, stub: StubServices) -> None:
        """On the thread of the stub's messages, after the last of them."""
        cause = stub.process.cause
        stub.abandon(not_healthy(self._name, cause))
        with self._changed:
            if not self._is_ready or self._is_closed:
                return
            self._is_ready = False
            self._down_since_s = time.monotonic()
            if self._has_served:
                self._pause_s = 0.0
            else:
                self._grow_pause()
            last_words = f" Its last words:\n{stub.process.last_lines}" if stub.process.last_lines else ""
            log.error("stub process '%s' is not healthy and is started again. %s%s", self._name, cause, last_words)
            self._start_restarter()

    def _start_restarter(self) -> None:
        """Holds the lock."""
        thread = threading.Thread(target=self._restart, name=f"python-restart-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: nobody may wait for what will not come
            self._failure = str(error)
            self._changed.notify_all()
        else:
            self._restarter = thread

    def _restart(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, self._pause_s):
                    return
            try:
                self._begin(None)
            except Exception as error:
                log.error("stub process '%s' could not be started again: %s", self._name, error)
                with self._changed:
                    self._failure = str(error)
                    self._grow_pause()
                    self._changed.notify_all()
            else:
                log.info("stub process '%s' serves again", self._name)
                return

    def _grow_pause(self) -> None:
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)

    def _not_available(self) -> TritonError:
        return unavailable(f"Stub process '{self._name}' is not healthy. {self._failure}".rstrip())
