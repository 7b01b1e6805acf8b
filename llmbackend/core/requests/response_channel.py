"""The path of responses back to a client. Only this module calls a request's response callback.

A request, its responses and its response factories are handles on its channel. Invariants: exactly one call of the
callback has FINAL, and it is the last; a channel whose last handle is dropped before FINAL completes itself with an
error, so that no client hangs. Source: the response factory of Triton's core, which does not check FINAL.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from ..backend_api import ResponseFlag, is_final
from ..errors import TritonError, internal, request_tag
from ..messages import InferenceRequest, InferenceResponse, ResponseCallback
from ..metrics.model_metrics import PhaseTimes, Statistics

log = logging.getLogger(__name__)

_NUMBERS = itertools.count(1)
_NONE = ResponseFlag.NONE
"""A constant: looking up a member of an enum is slow."""


class ActionThread:
    """Runs actions in order on a daemon thread, between `start` and `stop`, while holding no lock of the host.

    failure: logged if an action raises
    """

    def __init__(self, name: str, failure: str) -> None:
        self._name = name
        self._failure = failure
        self._actions: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_acting = False

    @property
    def backlog(self) -> int:
        """Actions that have not finished."""
        return self._actions.qsize() + self._is_acting

    def start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Runs the actions submitted so far, then ends the thread."""
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
                log.exception(self._failure)
            self._is_acting = False
            del action  # otherwise it would keep its request alive until the next action


class Reaper(ActionThread):
    """Completes requests that a backend has dropped. Actions come from `__del__`, which may run on any thread and while
    any lock is held: `submit` never blocks and takes no lock that Python code can hold (`SimpleQueue.put` is
    reentrant)."""

    def __init__(self) -> None:
        super().__init__("reaper", "completing an abandoned request failed")


class RequestObserver:
    """Observes a request of an ensemble or a warmup; does nothing by default. Called on any thread."""

    def apply_backpressure(self) -> None:
        """Called before each response of a backend with SendPolicy.BLOCKING. May block to apply backpressure."""

    def computed(self, times: PhaseTimes) -> None:
        """Called when the request succeeded, with the `times` reported by its backend."""

    def done(self) -> None:
        """Called when the last handle on the request is dropped."""


class ChannelOwner(Protocol):
    """The model version for which a request is made."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def reaper(self) -> Reaper: ...
    @property
    def statistics(self) -> Statistics: ...
    @property
    def may_block_in_send(self) -> bool:
        """Whether the backend has SendPolicy.BLOCKING."""

    def request_done(self, channel: ResponseChannel) -> None:
        """Called when the last handle on a request is dropped."""


class ResponseChannel:
    """The client's end of one request; also its InferenceHandle. Callbacks run while the channel's lock is held: they
    must only enqueue.

    number: identifies the request for operators; unique in this process
    instance: the instance that has the request or had it last; None = none yet
    response_indices: the index of the next response in statistics
    """

    __slots__ = (
        "_aborted", "_callback", "_count", "_dequeue", "_final_ns", "_handles", "_is_counted", "_lock",
        "_on_cancel", "instance", "is_cancelled", "number", "observer", "owner", "request_id",
        "response_indices", "start_ns", "tenant", "trace",
    )  # fmt: skip

    def __init__(
        self,
        request: InferenceRequest,
        callback: ResponseCallback,
        owner: ChannelOwner,
        observer: RequestObserver | None = None,
    ) -> None:
        self.number = next(_NUMBERS)
        self.request_id = request.id
        self.tenant = request.tenant
        self.owner = owner
        self.start_ns = time.monotonic_ns()
        self.observer = observer
        self.instance: object = None
        self._callback = callback
        self._lock = threading.RLock()
        self._handles = 0
        self._final_ns = 0
        self._count: Callable[[int], None] | None = None
        self._is_counted = False
        self.is_cancelled = False
        self._aborted = False
        self._on_cancel: list[Callable[[], None]] = []
        self._dequeue: Callable[[], None] | None = None
        self.response_indices = itertools.count()
        self.trace = request.trace
        if self.trace is not None:
            self.trace.begin(owner.name, owner.version, request.id, self.start_ns)

    @property
    def is_final(self) -> bool:
        """Whether the client has its last response. Handles may still be open."""
        return bool(self._final_ns)

    def retain(self) -> None:
        with self._lock:
            self._handles += 1

    def drop(self) -> None:
        """Drops one handle; the last one ends the channel."""
        with self._lock:
            self._handles -= 1
            if self._handles:
                return
            unfinished = not self._final_ns
        if unfinished:
            tag = request_tag(self.request_id)
            log.error("%sreleased by the backend of model '%s' without a final response", tag, self.owner.name)
            self.fail(internal(f"{tag}the backend of model '{self.owner.name}' ended the request without a response"))
        self.owner.request_done(self)
        if self.trace is not None:
            self.trace.end()
        if self.observer is not None:
            self.observer.done()

    def wrap_callback(self, wrap: Callable[[ResponseCallback], ResponseCallback]) -> bool:
        """Inserts a callback of the host before the client's. Returns False after FINAL."""
        with self._lock:
            if not self._final_ns:
                self._callback = wrap(self._callback)
            return not self._final_ns

    def send(self, response: InferenceResponse, flags: ResponseFlag) -> None:
        """Like `deliver`, but first calls the observer's `apply_backpressure` if the backend may be blocked."""
        if self.observer is not None and self.owner.may_block_in_send:
            self.observer.apply_backpressure()
        self.deliver(response, flags)

    def deliver(self, response: InferenceResponse | None, flags: ResponseFlag) -> bool:
        """Calls the client's callback. Returns False after FINAL (logged; nothing is delivered)."""
        if type(flags) is not ResponseFlag:
            flags = ResponseFlag(flags)  # a backend may pass a plain number
        with self._lock:
            if self._final_ns:
                if not self._aborted:
                    log.error(
                        "%smodel '%s' sent a response after its final one; it is dropped",
                        request_tag(self.request_id),
                        self.owner.name,
                    )
                return False
            if flags is not _NONE and is_final(flags):
                self._finish()  # before the callback: a client that has its last response finds it counted
            if self.trace is not None:
                error = response.error if response is not None else None
                outputs = response.outputs if response is not None else ()
                self.trace.responded(outputs, "" if error is None else error.code.name)
            try:
                self._callback(response, flags)
            except Exception:
                log.exception("%sthe response callback failed", request_tag(self.request_id))
            return True

    def _finish(self) -> None:
        self._final_ns = time.monotonic_ns()
        self._on_cancel.clear()
        self._dequeue = None
        if self._count is not None:
            self._count(self._final_ns)
            self._count = None

    def count_when_final(self, count: Callable[[int], None]) -> None:
        """Calls `count` with the time of FINAL (monotonic ns), now or later, to add the request to its model's
        statistics. Only the first call has an effect, so that a request is counted once."""
        with self._lock:
            if self._is_counted:
                return
            self._is_counted = True
            if self._final_ns:
                count(self._final_ns)
            else:
                self._count = count

    def count_now(self) -> None:
        """Counts the request before FINAL, because it continues and will be reported again."""
        with self._lock:
            count, self._count, self._is_counted = self._count, None, False
        if count is not None:
            count(time.monotonic_ns())

    def fail(self, error: TritonError) -> bool:
        """Ends the request with an error response. Returns False after FINAL."""
        response = InferenceResponse(self.owner.name, self.owner.version, self.request_id, error=error.copy())
        return self.deliver(response, ResponseFlag.FINAL)

    def withdraw(self) -> None:
        """Ends a request that was refused by an exception: its callback is never called."""
        with self._lock:
            self.observer = None
            self._final_ns = time.monotonic_ns()

    def cancel(self) -> None:
        """Asks the request to stop. Idempotent; may be called from any thread; no effect after FINAL."""
        with self._lock:
            if self.is_cancelled or self._final_ns:
                return
            callbacks = self._begin_cancel()
        self._call_cancel_callbacks(callbacks)

    def abort(self, error: TritonError) -> bool:
        """Ends the request for its client with `error`, and asks the backend to stop; its further responses are dropped
        without being logged. Returns False after FINAL."""
        with self._lock:
            if self._final_ns:
                return False
            self._aborted = True
            callbacks = self._begin_cancel()
            self.fail(error)
        self._call_cancel_callbacks(callbacks)
        return True

    def _begin_cancel(self) -> list[Callable[[], None]]:
        """The callbacks to call after the lock is released. The caller holds it."""
        self.is_cancelled = True
        callbacks = [*self._on_cancel, *([self._dequeue] if self._dequeue else [])]
        self._on_cancel.clear()
        return callbacks

    def _call_cancel_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("%sa cancellation callback failed", request_tag(self.request_id))

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Registers `callback`. Calls it immediately if the request has already been cancelled, never after FINAL."""
        with self._lock:
            if self._final_ns:
                return
            if not self.is_cancelled:
                self._on_cancel.append(callback)
                return
        callback()

    def clear_on_cancel(self) -> None:
        """Drops the callbacks of `on_cancel`, when the backend gives the request back. A cancellation that has come or
        comes before the next `on_cancel` reaches that one's callback."""
        with self._lock:
            self._on_cancel.clear()

    def set_dequeue(self, callback: Callable[[], None] | None) -> None:
        """Sets the scheduler's cancellation callback while the request is queued; None once it has left the queue."""
        with self._lock:
            self._dequeue = None if self._final_ns else callback
