"""Converts long requests on separate threads, so that the instance's thread can admit others meanwhile.

Invariant: each request here has a reserved place in the queue (TaskMap.reserve) and is converted or refused once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from llmbackend.core.backend_api import ErrorCode, Request, Tenant, TritonError, cancelled, internal, unavailable
from llmbackend.waiting.large_stacks import LargeStackExecutor
from llmbackend.waiting.timer import Alarm, Timer

from ..schemas.schema import may_have_constraint, num_bytes
from ..tasks.infer_task import InferTask
from ..tasks.task_map import TaskMap

logger = logging.getLogger(__name__)

MAX_THREADS = 2
SHORT_BYTES = 4096
"""Total size of all inputs: about a thousand tokens, rendered and tokenised in one or two milliseconds."""
_FEW_ELEMENTS = 64


def is_short(request: Request) -> bool:
    """Whether a request can be converted on its instance's thread. Compiling a constraint can take long, and so can
    repeating the responses of a resumed request. Sizes come first: a long text is not searched for constraints here."""
    if request.resume is not None and len(request.resume.deltas) > _FEW_ELEMENTS:
        return False
    tensors = request.inputs.values()
    if sum(tensor.data.size for tensor in tensors if tensor.datatype == "BYTES") > _FEW_ELEMENTS:
        return False
    texts = (len(value) for value in request.parameters.values() if isinstance(value, str))
    return sum(map(num_bytes, tensors)) + sum(texts) <= SHORT_BYTES and not may_have_constraint(request)


@dataclass(eq=False, slots=True)
class Conversion:
    """A request that has not become tasks yet."""

    request: Request
    level: int
    """Its priority level in the queue."""
    deadline_ns: int
    """time.monotonic_ns() at which it expires; 0 = never."""
    convert: Callable[[], Sequence[InferTask]]
    """Creates its tasks; none if it has answered the request itself."""
    refuse: Callable[[TritonError], None]
    """Answers the request with an error."""
    has_begun: bool = False
    """Whether it is running or has been refused."""
    is_stopped: bool = False
    """Whether its tasks are to be stopped as soon as they are queued."""
    alarm: Alarm | None = None


class ConversionPool:
    """`_changed` guards the set of conversions and their flags.

    A conversion that has not begun is ended by a cancel, by its deadline or by `drain`. One that is running is queued
    first; then its tasks end.
    """

    def __init__(
        self,
        name: str,
        tasks: TaskMap,
        timer: Timer,
        *,
        submit: Callable[[Sequence[InferTask]], None],
        stop: Callable[[InferTask], None],
        on_change: Callable[[], None],
        on_refused: Callable[[], None],
    ) -> None:
        """submit: queues the tasks of a request, or answers them; never raises
        stop: ends a task with its output so far
        on_change: called when the number of requests in the pool has changed
        on_refused: called when the queue is full, a deadline is over or the model is unloaded
        """
        self._tasks = tasks
        self._timer = timer
        self._submit_tasks = submit
        self._stop_task = stop
        self._on_change = on_change
        self._on_refused = on_refused
        self._threads = LargeStackExecutor(MAX_THREADS, thread_name_prefix=f"{name}-conversion")
        self._changed = threading.Condition()
        self._live: set[Conversion] = set()

    def start(self, conversion: Conversion) -> str:
        """Takes the request, or returns why the queue is too full for it."""
        refusal = self._tasks.reserve(conversion.level)
        if refusal:
            self._on_refused()
            return refusal
        with self._changed:
            self._live.add(conversion)
        # Before it can run: afterwards the request can be answered and released at any time.
        conversion.request.on_cancel(partial(self._end, conversion, cancelled("Request was cancelled")))
        self._on_change()
        try:
            if conversion.deadline_ns:
                conversion.alarm = partial(self._end, conversion, unavailable("Request timeout expired"))
                self._timer.start()
                self._timer.set(conversion.alarm, conversion.deadline_ns)
            self._threads.submit(self._run, conversion)
        except RuntimeError as error:  # no thread can be started; another one may have taken it meanwhile
            self._end(conversion, unavailable(f"the request cannot be converted now: {error}"))
        return ""

    def stop(self, client_id: str, by: Tenant) -> None:
        """Stops the requests with this id that `by` may end, as soon as they have become tasks."""
        with self._changed:
            for conversion in self._live:
                if conversion.request.id == client_id and by.may_end(conversion.request.tenant):
                    conversion.is_stopped = True

    def drain(self, error: TritonError) -> None:
        """Refuses all conversions that have not begun. Returns once the others are queued."""
        with self._changed:
            live = tuple(self._live)
        for conversion in live:
            self._end(conversion, error)
        with self._changed:
            self._changed.wait_for(lambda: not self._live)

    def close(self) -> None:
        """Ends the threads. To be called after `drain`."""
        self._threads.shutdown()

    def _end(self, conversion: Conversion, error: TritonError) -> None:
        """Refuses a conversion that has not begun."""
        with self._changed:
            if conversion.has_begun or conversion not in self._live:
                return
            conversion.has_begun = True
        self._tasks.release(conversion.level)
        if error.code is not ErrorCode.CANCELLED:
            self._on_refused()
        try:
            conversion.refuse(error)
        finally:
            self._forget(conversion)

    def _run(self, conversion: Conversion) -> None:
        with self._changed:
            if conversion.has_begun:
                return
            conversion.has_begun = True
        try:
            tasks = self._converted(conversion)
            self._tasks.release(conversion.level)  # each task takes a place of its own
            if tasks:
                self._submit_tasks(tasks)
        finally:
            self._forget(conversion)
        if conversion.is_stopped:
            for task in tasks:
                self._stop_task(task)

    def _converted(self, conversion: Conversion) -> Sequence[InferTask]:
        """The request's tasks; empty if the request has been answered."""
        try:
            return conversion.convert()
        except Exception as error:
            logger.exception("a request could not be converted")
            conversion.refuse(internal(f"the request could not be converted: {error}"))
            return ()

    def _forget(self, conversion: Conversion) -> None:
        if conversion.alarm is not None:
            self._timer.clear(conversion.alarm)
        self._on_change()
        with self._changed:
            self._live.discard(conversion)
            self._changed.notify_all()
