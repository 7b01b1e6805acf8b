"""One request's way back to its client: the only place that calls its response callback.

For: requests, responses and response factories, which are handles on a channel. Does not know: tensors' content,
schedulers, backends. Invariants: exactly one callback carries FINAL and none comes after it; the channel is done when
its last handle is dropped, and a channel whose last handle went without FINAL completes itself with an error, so that
no client hangs.
Source: the response factory of Triton's core, which does not police FINAL.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from llmbackend.core.backend_api import ResponseFlag, is_final
from llmbackend.core.errors import TritonError, internal, request_tag
from llmbackend.core.messages import InferenceRequest, InferenceResponse, ResponseCallback
from llmbackend.core.statistics import Statistics

from .reaper import Reaper

log = logging.getLogger(__name__)


class ChannelOwner(Protocol):
    """The model version that a request is for."""

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
        """Whether the backend asked to be held back where its responses are taken too slowly."""

    def request_done(self, channel: ResponseChannel) -> None:
        """The last handle of a request was dropped."""


class ResponseChannel:
    """The client's end of one request; also its InferenceHandle. Callbacks run under the channel's lock: they only
    enqueue.
    """

    def __init__(self, request: InferenceRequest, owner: ChannelOwner) -> None:
        self.request_id = request.id
        self.tenant = request.tenant
        self.owner = owner
        self.start_ns = time.monotonic_ns()
        self.observer = request.observer
        self.instance: object = None  # the one that has the request, or had it last
        self._callback = request.response_callback
        self._lock = threading.RLock()
        self._handles = 0
        self._final_ns = 0
        self._on_final: Callable[[int], None] | None = None
        self._is_counted = False
        self._cancelled = False
        self._aborted = False
        self._on_cancel: list[Callable[[], None]] = []
        self._dequeue: Callable[[], None] | None = None
        self._response_index = 0
        self.trace = request.trace
        if self.trace is not None:
            self.trace.begin(owner.name, owner.version, request.id, self.start_ns)

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    @property
    def is_final(self) -> bool:
        """Whether the client has its last response; handles may still be open."""
        return bool(self._final_ns)

    def retain(self) -> None:
        with self._lock:
            self._handles += 1

    def drop(self) -> None:
        """Gives one handle back; the last one ends the channel."""
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

    def intercept(self, wrap: Callable[[ResponseCallback], ResponseCallback]) -> bool:
        """Puts a callback of the host between the responses and the client's; False when FINAL went before."""
        with self._lock:
            if not self._final_ns:
                self._callback = wrap(self._callback)
            return not self._final_ns

    def deliver(self, response: InferenceResponse | None, flags: ResponseFlag) -> bool:
        """Calls the client's callback; False when FINAL went before (logged, nothing delivered)."""
        if type(flags) is not ResponseFlag:
            flags = ResponseFlag(flags)  # a backend may give a plain number
        with self._lock:
            if self._final_ns:
                if not self._aborted:
                    log.error(
                        "%smodel '%s' sent a response after its final one; it is dropped",
                        request_tag(self.request_id),
                        self.owner.name,
                    )
                return False
            if is_final(flags):
                self._finish()  # before the callback, so that whoever has seen the last response also sees it counted
            if self.trace is not None:
                self.trace.responded(response.outputs if response is not None else ())
            try:
                self._callback(response, flags)
            except Exception:
                log.exception("%sthe response callback failed", request_tag(self.request_id))
            return True

    def _finish(self) -> None:
        self._final_ns = time.monotonic_ns()
        self._on_cancel.clear()
        self._dequeue = None
        if self._on_final is not None:
            self._on_final(self._final_ns)
            self._on_final = None

    def when_final(self, callback: Callable[[int], None]) -> None:
        """Calls `callback` with the time of FINAL (monotonic ns), now or later. Only the first callback counts, so that
        a request is counted once whoever reports it."""
        with self._lock:
            if self._is_counted:
                return
            self._is_counted = True
            if self._final_ns:
                callback(self._final_ns)
            else:
                self._on_final = callback

    def count_now(self) -> None:
        """Counts what was reported although FINAL did not come: the request goes on, and will be reported again."""
        with self._lock:
            on_final, self._on_final, self._is_counted = self._on_final, None, False
        if on_final is not None:
            on_final(time.monotonic_ns())

    def fail(self, error: TritonError) -> bool:
        """Ends the request with an error response; False when it had ended before."""
        # A fresh error: the traceback of the given one holds frames, and they hold requests.
        return self.deliver(self.response(error=TritonError(error.message, error.code)), ResponseFlag.FINAL)

    def withdraw(self) -> None:
        """Ends a request that was refused synchronously: no callback will come."""
        with self._lock:
            self.observer = None
            self._final_ns = time.monotonic_ns()

    def response(self, error: TritonError | None = None) -> InferenceResponse:
        return InferenceResponse(self.owner.name, self.owner.version, self.request_id, error=error)

    def next_response_index(self) -> int:
        with self._lock:
            index = self._response_index
            self._response_index += 1
            return index

    def cancel(self) -> None:
        """Asks for cancellation: idempotent, any thread, no effect after FINAL."""
        with self._lock:
            if self._cancelled or self._final_ns:
                return
            callbacks = self._start_cancelling()
        self._run_cancelling(callbacks)

    def abort(self, error: TritonError) -> bool:
        """Ends the request for its client at once, with `error`, and asks the backend to drop it; what the backend
        still sends is dropped in silence. False when the client had its last response before."""
        with self._lock:
            if self._final_ns:
                return False
            self._aborted = True
            callbacks = self._start_cancelling()
            self.fail(error)
        self._run_cancelling(callbacks)
        return True

    def _start_cancelling(self) -> list[Callable[[], None]]:
        """Whom to tell. Holds the lock."""
        self._cancelled = True
        callbacks = [*self._on_cancel, *([self._dequeue] if self._dequeue else [])]
        self._on_cancel.clear()
        return callbacks

    def _run_cancelling(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("%sa cancellation callback failed", request_tag(self.request_id))

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Registers `callback`; called at once when already cancelled, never after FINAL."""
        with self._lock:
            if self._final_ns:
                return
            if not self._cancelled:
                self._on_cancel.append(callback)
                return
        callback()

    def set_dequeue(self, callback: Callable[[], None] | None) -> None:
        """The scheduler's own cancellation callback while the request waits in a queue; None when it left the queue."""
        with self._lock:
            self._dequeue = None if self._final_ns else callback
