"""The requests of an ensemble to its composing models, how many run at once, and the thread that starts them.

For: the ensemble scheduler and its runs. Does not know: the flow of tensors. Invariants: a step's request tells its run
exactly once that it had its last response or was refused, and then that it is gone; waiting requests start in order of
arrival.
Source: StepInflightRequestLimiter and the callback pool of Triton's ensemble_scheduler.cc.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from llmbackend.core.backend_api import ResponseFlag
from llmbackend.core.errors import TritonError, internal
from llmbackend.core.messages import InferenceHandle, InferenceResponse
from llmbackend.core.metrics.statistics import PhaseTimes
from llmbackend.core.tensors import Tensor

from .graph import EnsembleStep, Origin, SequenceTag

log = logging.getLogger(__name__)

MAX_WAIT_S = 300.0
"""A backend that waited so long goes on, in case it waits for itself (Triton's kMutexTimeoutSeconds)."""


class StepOwner(Protocol):
    """The run of an ensemble's request, as its steps' requests see it. Any thread."""

    def send(self, step_request: StepRequest) -> InferenceHandle:
        """Sends it to its model. Raises TritonError when it is refused, or no longer wanted."""

    def refused(self, step_request: StepRequest, error: TritonError) -> None:
        """It was started, but its model does not have it."""

    def responded(self, step_request: StepRequest, response: InferenceResponse | None, flags: ResponseFlag) -> None: ...
    def make_room(self, step_request: StepRequest) -> None:
        """Blocks the thread of the step's backend while steps behind it have all requests that they may have."""

    def wants(self, step_request: StepRequest) -> bool:
        """Whether what it still makes can be part of the ensemble's responses."""

    def add_times(self, times: PhaseTimes) -> None: ...
    def step_gone(self) -> None: ...


class StepRequest:
    """One request of an ensemble to one of its composing models: the response callback, observer and handle of it.

    is_over: its last response has come
    response_count: responses so far
    batch_size: of its inputs, 0 = not batched
    waiting_bytes: what its inputs hold while it waits for a slot
    The run's lock guards the attributes that change.
    """

    def __init__(
        self,
        run: StepOwner,
        step: EnsembleStep,
        is_decoupled: bool,
        origin: Origin,
        inputs: tuple[Tensor, ...],
        batch_size: int,
        sequence: SequenceTag,
    ) -> None:
        self.step = step
        self.is_decoupled = is_decoupled
        self.response_count = 0
        self.is_over = False
        self.inputs = inputs
        self.batch_size = batch_size
        self.sequence = sequence
        self.waiting_bytes = 0
        self._origin = origin
        self._run = run
        self._handle: InferenceHandle | None = None
        self._is_gone = False

    @property
    def is_of_stream(self) -> bool:
        """Whether a response of a decoupled step brought it about; there may be any number of them."""
        return bool(self._origin)

    @property
    def next_origin(self) -> Origin:
        """The origin of its next response, which is the earliest that it can still have."""
        return (*self._origin, self.response_count) if self.is_decoupled else self._origin

    def start(self) -> None:
        """Sends it to its model, or tells the run why not. Never raises."""
        try:
            self._handle = self._run.send(self)
        except TritonError as error:
            self._run.refused(self, error)
        except Exception as error:
            log.exception("a step of an ensemble could not be sent to model '%s'", self.step.model[0])
            self._run.refused(self, internal(f"{type(error).__name__}: {error}"))
        else:
            self.inputs = ()
            if not self._run.wants(self):
                self.cancel()  # it was stopped before it had a handle
            if self._is_gone:
                self._handle = None

    def cancel(self) -> None:
        handle = self._handle
        if handle is not None:
            handle.cancel()

    def __call__(self, response: InferenceResponse | None, flags: ResponseFlag) -> None:
        self._run.responded(self, response, flags)

    def make_room(self) -> None:
        self._run.make_room(self)

    def computed(self, times: PhaseTimes) -> None:
        self._run.add_times(times)

    def done(self) -> None:
        self._is_gone = True
        self._handle = None  # it holds this object
        self._run.step_gone()


class StepLimit:
    """How many requests of one step run at once, over all requests of the ensemble (`max_inflight_requests`).

    A backend that sends many responses and may be blocked waits in `make_room` while any of the step's requests waits
    for a slot, so that no more than one response per thread of such a backend is kept; what other backends send is
    bounded by the run that it is for.

    By design different from Triton, whose limiter makes every caller wait, also a frontend, and whose pool keeps no
    order.
    """

    def __init__(self, max_running: int, subject: str) -> None:
        self._max_running = max_running
        self._subject = subject
        self._changed = threading.Condition(threading.Lock())
        self._num_running = 0
        self._waiting: OrderedDict[StepRequest, None] = OrderedDict()
        self._is_starting = False

    def __len__(self) -> int:
        """How many run or wait."""
        return self._num_running + len(self._waiting)

    def add(self, step_request: StepRequest) -> None:
        """It waits for a slot; `start_waiting` must follow, under no lock."""
        with self._changed:
            self._waiting[step_request] = None

    def finished(self) -> None:
        """One of those that were started is over; `start_waiting` must follow, under no lock."""
        with self._changed:
            self._num_running -= 1
            self._changed.notify_all()

    def discard(self, step_request: StepRequest) -> bool:
        """Whether it still waited; then it will not be started."""
        with self._changed:
            if step_request not in self._waiting:
                return False
            del self._waiting[step_request]
            self._changed.notify_all()
            return True

    def make_room(self, is_pointless: Callable[[], bool]) -> None:
        """Blocks until a request could start at once, or until waiting is pointless (asked again after `wake`)."""
        with self._changed:
            if not self._changed.wait_for(lambda: is_pointless() or len(self) < self._max_running, MAX_WAIT_S):
                log.error(
                    "%s unable to schedule (inflight: %d >= limit: %d) for %d seconds. Proceeding to avoid deadlock.",
                    self._subject,
                    len(self),
                    self._max_running,
                    MAX_WAIT_S,
                )

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def start_waiting(self) -> None:
        """Starts what there are slots for. One thread at a time does: a request that is over as soon as it starts frees
        its slot from within `start`."""
        with self._changed:
            if self._is_starting:
                return
            self._is_starting = True
        while True:
            with self._changed:
                if not self._waiting or self._num_running >= self._max_running:
                    self._is_starting = False
                    return
                step_request, _ = self._waiting.popitem(last=False)
                self._num_running += 1
            step_request.start()


class StepLauncher:
    """The thread on which an ensemble starts and stops the steps that a response of another step brings about.

    Actions run in the order in which they came, one at a time and under no lock of the host (a response callback, which
    runs under several, must only enqueue). The thread is there from the first action on, and gone after `stop`.
    """

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
