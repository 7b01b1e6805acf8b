"""Keeps one instance's stub process alive: starts it, starts it again when it dies, ends it.

For: ModelInstanceState. Does not know: requests, what a stub does. Invariants: at most one stub serves at a time; one
that dies after it served is followed by another at once, one that did not serve after a growing pause; `get` waits
while a stub is being started, and raises with the cause while that fails.
Source: ours. Triton's python backend answers `Stub process '…' is not healthy.` from then on, and starts none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from llmbackend.core.backend_api import TritonError, unavailable
from llmbackend.fork_server.client import restart_pause_s

from .stub_process import StubDeadError, StubRaisedError
from .stub_services import StubServices
from .wire_messages import not_healthy

log = logging.getLogger(__name__)

READY_PATIENCE_S = 2.0
"""A model whose stub takes longer than this to start again is not ready."""


class StubSupervisor:
    """`start` and `close` are for the instance's owner, the rest for any thread."""

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
        self._num_failures = 0
        self._restarter: threading.Thread | None = None

    def start(self, spare: StubServices | None) -> None:
        """Starts the first stub, or takes `spare`. Raises TritonError when it does not become ready."""
        try:
            self._begin(spare)
        except BaseException:
            self._is_closed = True
            raise

    def get(self) -> StubServices:
        """The stub, once it is ready. Raises TritonError UNAVAILABLE while it cannot be started."""
        if self._is_ready and self._has_served and self._stub is not None:
            return self._stub  # it may die the next moment in any case
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready or self._failure or self._is_closed)
            if not self._is_ready or self._stub is None:
                raise self._not_available()
            self._has_served = True
            return self._stub

    def check_ready(self) -> None:
        """Raises TritonError UNAVAILABLE when requests would be refused or wait for long, or when the model says that
        it is not ready, for which it may take its time."""
        with self._changed:
            is_patient = not self._failure and time.monotonic() - self._down_since_s < READY_PATIENCE_S
            if not self._is_ready and not is_patient:
                raise self._not_available()
            stub = self._stub if self._is_ready else None
        if stub is not None and (reason := stub.not_ready_reason()):
            raise unavailable(f"instance '{self._name}': {reason}")

    def kill(self) -> int:
        """Kills the process that serves, and returns its id. Raises TritonError UNAVAILABLE while there is none."""
        with self._changed:
            if not self._is_ready or self._stub is None:
                raise self._not_available()
            process = self._stub.process
        process.kill()
        return process.pid

    @property
    def pid(self) -> int:
        """Of the process that serves; 0 while there is none. Never blocks."""
        stub = self._stub
        return stub.process.pid if stub is not None and self._is_ready else 0

    def close(self, timeout_s: float) -> None:
        """Lets the model finalize and ends the process, by force after `timeout_s`."""
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
            log.error("finalize of instance '%s' took longer than %g s; killing its process", self._name, timeout_s)
            stub.process.kill()
        except StubDeadError as error:
            log.error("the process of instance '%s' ended before it was finalized. %s", self._name, error)

    def _begin(self, stub: StubServices | None) -> None:
        """Raises TritonError when the stub does not become ready; it has ended then."""
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
            self._num_failures = 0 if self._has_served else self._num_failures + 1
            output = f" Its last output:\n{stub.process.last_lines}" if stub.process.last_lines else ""
            log.error("stub process '%s' is not healthy; restarting it. %s%s", self._name, cause, output)
            self._start_restarter()

    def _start_restarter(self) -> None:
        """Holds the lock."""
        thread = threading.Thread(target=self._restart, name=f"python-restart-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: `get` must not wait for a stub that does not come
            self._failure = str(error)
            self._changed.notify_all()
        else:
            self._restarter = thread

    def _restart(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, restart_pause_s(self._num_failures)):
                    return
            try:
                self._begin(None)
            except Exception as error:
                log.error("stub process '%s' could not be restarted: %s", self._name, error)
                with self._changed:
                    self._failure = str(error)
                    self._num_failures += 1
                    self._changed.notify_all()
            else:
                log.info("stub process '%s' is serving again", self._name)
                return

    def _not_available(self) -> TritonError:
        return unavailable(f"Stub process '{self._name}' is not healthy. {self._failure}".rstrip())
