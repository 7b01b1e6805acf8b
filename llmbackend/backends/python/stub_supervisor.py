"""Keeps the process of one instance alive: a model.py's stub, or that of an isolated library.

Invariant: at most one process serves at a time. The restart is an addition: Triton answers `Stub process '…' is not
healthy.` from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from llmbackend.core.backend_api import Request, TritonError, cancelled, unavailable
from llmbackend.fork_server.client import restart_pause_s
from llmbackend.fork_server.host_policy import NO_POLICY, HostPolicy

from .stub_process import StubDeadError, StubProcess, StubRaisedError
from .wire_messages import not_healthy

log = logging.getLogger(__name__)

READY_PATIENCE_S = 2.0
"""If restarting a stub takes longer than this, its model is not ready."""


class SupervisedStub(Protocol):
    """A process and the host's services for it."""

    process: StubProcess
    is_abandoned: bool

    def not_ready_reason(self) -> str:
        """Why its model is not ready; "" if it is."""

    def abandon(self, error: TritonError) -> None:
        """Called when the process has ended: ends its requests with `error`."""


Stub = TypeVar("Stub", bound=SupervisedStub)


class Spare(Generic[Stub]):
    """The process that loaded the model before there were instances, until an instance takes it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stub: Stub | None = None

    def put(self, stub: Stub) -> None:
        self._stub = stub

    def take(self, policy: HostPolicy = NO_POLICY) -> Stub | None:
        """None if there is none, or if it is not bound as specified by `policy`."""
        if policy != NO_POLICY:
            return None
        with self._lock:
            stub, self._stub = self._stub, None
            return stub


class StubSupervisor(Generic[Stub]):
    """Keeps a stub process alive. A stub that dies after it has served is restarted immediately, others after an
    increasing pause. `start` and `close` are called by the instance's owner, the rest from any thread."""

    def __init__(
        self, name: str, launch: Callable[[], Stub], prepare: Callable[[Stub], None], patience_s: float
    ) -> None:
        """prepare: makes a launched stub ready to execute; raises TritonError if that fails
        patience_s: how long a batch waits for a stub. Not how long after a stub's death: the instance would then
        refuse all requests of the queue that it shares with instances that serve"""
        self._name = name
        self._patience_s = patience_s
        self._launch = launch
        self._prepare = prepare
        self._changed = threading.Condition()
        self._stub: Stub | None = None
        self._is_ready = False
        self._is_closed = False
        self._has_served = False
        self._failure = ""
        self._down_since_s = 0.0
        self._num_failures = 0
        self._restarter: threading.Thread | None = None
        self._lacks_restarter = False
        """Whether the stub has ended, and no thread could be started that restarts it."""

    def start(self, spare: Stub | None) -> None:
        """Starts the first stub, or takes `spare`. Raises TritonError if it does not become ready."""
        try:
            self._begin(spare)
        except BaseException:
            self._is_closed = True
            raise

    def get(self, requests: Sequence[Request] = ()) -> Stub:
        """The stub for `requests`; waits while it is being started. Raises TritonError CANCELLED if meanwhile all of
        them are cancelled, UNAVAILABLE if the stub cannot be started or this takes longer than `patience_s`."""
        if self._is_ready and self._has_served and self._stub is not None:
            return self._stub  # it may die at any time, even while the lock is held
        for request in requests:
            request.on_cancel(self._wake)
        with self._changed:
            self._start_lacking_restarter()
            self._changed.wait_for(
                lambda: self._is_ready or self._failure or self._is_closed or _are_cancelled(requests), self._patience_s
            )
            if self._is_ready and self._stub is not None:
                self._has_served = True
                return self._stub
            raise cancelled("Request cancelled") if _are_cancelled(requests) else self._not_available()

    def _wake(self) -> None:
        """Called on the cancelling thread."""
        with self._changed:
            self._changed.notify_all()

    def check_ready(self) -> None:
        """Raises TritonError UNAVAILABLE if requests would be refused or wait for long, or if the model reports (after
        up to 5 s) that it is not ready."""
        with self._changed:
            self._start_lacking_restarter()
            is_patient = not self._failure and time.monotonic() - self._down_since_s < READY_PATIENCE_S
            if not self._is_ready and not is_patient:
                raise self._not_available()
            stub = self._stub if self._is_ready else None
        if stub is not None and (reason := stub.not_ready_reason()):
            raise unavailable(f"instance '{self._name}': {reason}")

    def kill(self) -> int:
        """Kills the serving process and returns its id. Raises TritonError UNAVAILABLE while there is none."""
        with self._changed:
            if not self._is_ready or self._stub is None:
                raise self._not_available()
            process = self._stub.process
        process.kill()
        return process.pid

    @property
    def pid(self) -> int:
        """The id of the serving process; 0 while there is none. Never blocks."""
        stub = self._stub
        return stub.process.pid if stub is not None and self._is_ready else 0

    def close(self, timeout_s: float) -> None:
        """Calls the model's finalize and ends the process; kills it after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            was_ready, self._is_ready, self._is_closed = self._is_ready, False, True
            starting = None if was_ready else self._stub
            self._changed.notify_all()
        if starting is not None:
            starting.process.kill()
        if self._restarter is not None:
            self._restarter.join()
        del self._launch, self._prepare  # they refer to the owner of this object
        if self._stub is None:
            return
        if was_ready:
            self._finalize(self._stub, timeout_s)
        self._stub.process.close(max(deadline_s - time.monotonic(), 0.0))
        self._stub.process.on_end = None  # it refers to this object

    def _finalize(self, stub: Stub, timeout_s: float) -> None:
        try:
            stub.process.call("finalize", None, timeout_s=timeout_s)
        except StubRaisedError as error:
            log.error("finalize of instance '%s' failed: %s", self._name, error)
        except TimeoutError:
            log.error("finalize of instance '%s' took longer than %g s; killing its process", self._name, timeout_s)
            stub.process.kill()
        except StubDeadError as error:
            log.error("the process of instance '%s' ended before it was finalized. %s", self._name, error)

    def _begin(self, stub: Stub | None) -> None:
        """Raises TritonError if the stub does not become ready; it has then ended."""
        stub = stub or self._launch()
        stub.process.name = self._name
        stub.process.on_end = partial(self._on_end, stub)
        with self._changed:
            self._stub = stub
            is_closed = self._is_closed
        if is_closed:
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

    def _on_end(self, stub: Stub) -> None:
        """Called on the thread of the stub's messages, after the last of them."""
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
        """Holds the lock. If there are no more threads, requests are refused until one can be started."""
        thread = threading.Thread(target=self._restart, name=f"python-restart-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._failure, self._lacks_restarter = str(error), True
            self._changed.notify_all()
        else:
            self._restarter, self._failure, self._lacks_restarter = thread, "", False

    def _start_lacking_restarter(self) -> None:
        """Tries again. Holds the lock. Not only for requests: none may come to a model that is not ready."""
        if self._lacks_restarter and not self._is_closed:
            self._start_restarter()

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
        reason = self._failure or ("" if self._is_closed else "It is being started.")
        return unavailable(f"Stub process '{self._name}' is not healthy. {reason}".rstrip())


def _are_cancelled(requests: Sequence[Request]) -> bool:
    return bool(requests) and all(request.is_cancelled for request in requests)
