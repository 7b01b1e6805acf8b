"""Long requests on their way from Execute to the queue: a few threads per model, beside its instance threads.

For: ModelInstanceState, whose thread admits all requests of an instance; a template and a tokenizer may take seconds
for what fits into a long context. Does not know: how a request is converted, answered or queued.
Invariants: what waits here has a place in the queue's bounds (TaskMap.reserve). A conversion that has not begun is
ended at once by a cancel, its deadline or `drain`; one that runs goes on into the queue, where the same cancel or
deadline meets it. Each is converted or refused, once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from llmbackend.core.backend_api import Request, Tenant, TritonError, cancelled, unavailable
from llmbackend.waiting.timer import Alarm, Timer

from .infer_task import InferTask
from .task_map import TaskMap
from .tensor_schema import num_bytes

logger = logging.getLogger(__name__)

MAX_THREADS = 2
SHORT_BYTES = 4096
"""Of all inputs: about a thousand tokens, rendered and tokenised in a millisecond or two."""
_FEW_ELEMENTS = 64


def is_short(request: Request) -> bool:
    """Whether its conversion is too short to be worth another thread."""
    tensors = request.inputs.values()
    if sum(tensor.data.size for tensor in tensors if tensor.datatype == "BYTES") > _FEW_ELEMENTS:
        return False
    texts = (len(value) for value in request.parameters.values() if isinstance(value, str))
    return sum(map(num_bytes, tensors)) + sum(texts) <= SHORT_BYTES


@dataclass(eq=False, slots=True)
class Conversion:
    """One request before it is a task.

    level: where it will wait. deadline_ns: time.monotonic_ns() at which it expires, 0 = never. convert: makes its
    tasks; none when it refused the request itself. refuse: answers the request with an error. submit: queues a task.
    stop: ends a task with what it has.
    """

    request: Request
    level: int
    deadline_ns: int
    convert: Callable[[], Sequence[InferTask]]
    refuse: Callable[[TritonError], None]
    submit: Callable[[InferTask], None]
    stop: Callable[[InferTask], None]
    has_begun: bool = False
    is_stopped: bool = False
    alarm: Alarm | None = None


class ConversionPool:
    """`_changed` owns the set of conversions and their flags."""

    def __init__(self, name: str, tasks: TaskMap, timer: Timer, on_change: Callable[[], None]) -> None:
        """on_change: the number of requests here is another one."""
        self._tasks = tasks
        self._timer = timer
        self._on_change = on_change
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=f"{name}-conversion")
        self._changed = threading.Condition()
        self._live: set[Conversion] = set()

    def start(self, conversion: Conversion) -> str:
        """Takes the request; or says why the queue is too full for it."""
        refusal = self._tasks.reserve(conversion.level)
        if refusal:
            return refusal
        with self._changed:
            self._live.add(conversion)
        # Before it can run: afterwards the request may be answered and released at any time.
        conversion.request.on_cancel(partial(self._end, conversion, cancelled("Request was cancelled")))
        if conversion.deadline_ns:
            conversion.alarm = partial(self._end, conversion, unavailable("Request timeout expired"))
            self._timer.start()
            self._timer.set(conversion.alarm, conversion.deadline_ns)
        self._on_change()
        self._threads.submit(self._run, conversion)
        return ""

    def stop(self, client_id: str, by: Tenant) -> None:
        """The requests with this id that `by` may end are stopped as soon as they are tasks."""
        with self._changed:
            for conversion in self._live:
                if conversion.request.id == client_id and by.may_end(conversion.request.tenant):
                    conversion.is_stopped = True

    def drain(self, error: TritonError) -> None:
        """Refuses what has not begun; returns when the rest is converted and handed on."""
        with self._changed:
            live = tuple(self._live)
        for conversion in live:
            self._end(conversion, error)
        with self._changed:
            self._changed.wait_for(lambda: not self._live)

    def close(self) -> None:
        """Ends the threads; after `drain`."""
        self._threads.shutdown()

    def _end(self, conversion: Conversion, error: TritonError) -> None:
        """Refuses a conversion that has not begun."""
        with self._changed:
            if conversion.has_begun or conversion not in self._live:
                return
            conversion.has_begun = True  # so that no other caller refuses or runs it
        self._tasks.release(conversion.level)
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
            tasks = conversion.convert()
            self._tasks.release(conversion.level)  # each task takes a place of its own
            for task in tasks:
                conversion.submit(task)
        except Exception:
            logger.exception("a converted request could not be queued")
            tasks = ()
        finally:
            self._forget(conversion)
        if conversion.is_stopped:
            for task in tasks:
                conversion.stop(task)

    def _forget(self, conversion: Conversion) -> None:
        if conversion.alarm is not None:
            self._timer.clear(conversion.alarm)
        self._on_change()
        with self._changed:
            self._live.discard(conversion)
            self._changed.notify_all()
