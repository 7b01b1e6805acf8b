"""What one sampled request collects on its way: times and tensors, of its frontend and of every model it runs through.

For: the core (requests, channels, instances), frontends, and schedulers that make requests of their own. Does not know:
who asked for a trace, where it ends. Invariants: any thread may report; a trace is complete, and handed to its sink,
exactly once: when its frontend has closed it and every model in it has ended its request; what one trace holds is
bounded.
Source: Triton's TRITONSERVER_InferenceTrace and TraceManager::Trace; golden 60.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from ..tensors import Tensor
from .settings import TraceLevel
from .tensor_text import tensor_fields

log = logging.getLogger(__name__)

MAX_REPORTS: Final = 4096
"""Of one model in one trace: the responses of a longer stream are not traced beyond; its end is."""


class TraceSink(Protocol):
    """Where traces go. Called under no lock of the trace's; `complete` once for each `begin`."""

    def begin(self, trace: Trace) -> None:
        """A request was sampled."""

    def begin_model(self, report: RequestTrace, start_ns: int) -> None:
        """A model begins with its part; sets `report.context` if backends are to know it."""

    def complete(self, trace: Trace) -> None: ...


class Trace:
    """One sampled request as a whole. Made by the trace manager."""

    def __init__(
        self,
        level: TraceLevel,
        sink: TraceSink,
        new_id: Callable[[], int],
        on_complete: Callable[[], None],
        parent_context: Any = None,
    ) -> None:
        """parent_context: the client's own trace (OpenTelemetry)."""
        self.level = level
        self.sink = sink
        self.parent_context = parent_context
        self._new_id = new_id
        self._on_complete = on_complete
        self._lock = threading.Lock()
        self._open = 1
        self._reports: list[RequestTrace] = []
        self.root_span: Any = None
        """The sink's own slot."""
        self.root = self.add(parent=None)
        sink.begin(self)

    @property
    def reports(self) -> list[RequestTrace]:
        """In the order in which they began: the frontend's and its model's, then those of composing models."""
        with self._lock:
            return list(self._reports)

    def add(self, parent: RequestTrace | None) -> RequestTrace:
        report = RequestTrace(self, self._new_id(), parent)
        with self._lock:
            self._reports.append(report)
        return report

    def enter(self) -> bool:
        """One more has something to report; False when the trace is complete already."""
        with self._lock:
            if not self._open:
                return False
            self._open += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open:
                return
        try:
            self.sink.complete(self)
        except Exception:
            log.exception("a trace is lost")  # no request may suffer for it
        self._on_complete()


class RequestTrace:
    """One model's part of a trace; the root's also holds what the frontend reports.

    Whoever runs another model on behalf of this request gives that request `child()` as its trace.
    """

    def __init__(self, trace: Trace, trace_id: int, parent: RequestTrace | None) -> None:
        self.trace = trace
        self.id = trace_id
        self.parent = parent
        self.model_name = ""
        self.model_version = 0
        self.request_id = ""
        self.context = ""
        """For the backend: the model's span as a JSON object with `traceparent` (OpenTelemetry), or ""."""
        self.span: Any = None
        """The sink's own slot."""
        self.items: list[tuple[int, str, dict[str, str] | None]] = []
        """(monotonic ns, activity, the tensor it is about), in the order of reporting."""
        self._times = TraceLevel.TIMESTAMPS in trace.level
        self._tensors = TraceLevel.TENSORS in trace.level
        self._is_closed = False
        self._is_running = False

    @property
    def parent_id(self) -> int:
        """0 = the client asked for this itself."""
        return 0 if self.parent is None else self.parent.id

    def child(self) -> RequestTrace:
        """For a request that is made on behalf of this one."""
        return self.trace.add(parent=self)

    # --- frontends --------------------------------------------------------------------------------------------------

    def mark(self, activity: str, ns: int = 0) -> None:
        """`activity` happened at `ns` (monotonic), or now."""
        if self._times:
            self.items.append((ns or time.monotonic_ns(), activity, None))

    def close(self) -> None:
        """The frontend has sent its last byte. Of the root only; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.trace.leave()

    # --- the core ---------------------------------------------------------------------------------------------------

    def begin(self, model_name: str, model_version: int, request_id: str, start_ns: int) -> None:
        """A model takes the request. `end` must follow."""
        self.model_name, self.model_version, self.request_id = model_name, model_version, request_id
        self._is_running = self.trace.enter()
        if self._is_running:
            self.trace.sink.begin_model(self, start_ns)
            self.mark("REQUEST_START", start_ns)

    def inputs(self, tensors: Iterable[Tensor]) -> None:
        """What the model is asked about."""
        self._report_tensors("TENSOR_QUEUE_INPUT", tensors)

    def queued(self, ns: int) -> None:
        """The request came into a queue; 0 = it never did."""
        if ns:
            self.mark("QUEUE_START", ns)

    def computed(self, exec_start_ns: int, compute_start_ns: int, compute_end_ns: int, exec_end_ns: int) -> None:
        self.mark("COMPUTE_START", exec_start_ns)
        self.mark("COMPUTE_INPUT_END", compute_start_ns)
        self.mark("COMPUTE_OUTPUT_START", compute_end_ns)
        self.mark("COMPUTE_END", exec_end_ns)

    def responded(self, outputs: Iterable[Tensor]) -> None:
        if len(self.items) >= MAX_REPORTS:
            return
        self._report_tensors("TENSOR_BACKEND_OUTPUT", outputs)
        if self.parent is None:  # a composing model does not answer the client
            self.mark("INFER_RESPONSE_COMPLETE")

    def end(self) -> None:
        """The model has done with the request."""
        if not self._is_running:
            return
        self._is_running = False
        if self._times:
            self.items.append((time.monotonic_ns(), "REQUEST_END", None))
        self.trace.leave()

    def _report_tensors(self, activity: str, tensors: Iterable[Tensor]) -> None:
        if self._tensors:
            now_ns = time.monotonic_ns()
            self.items += [(now_ns, activity, tensor_fields(tensor)) for tensor in tensors]


def child_of(trace: RequestTrace | None) -> RequestTrace | None:
    """For a request made on behalf of another one, which has `trace` if it is traced."""
    return None if trace is None else trace.child()
