"""The trace of one sampled request (times and tensors, from frontend and models), and the trace settings.

Any thread may report. The memory of a trace is bounded. Source: TRITONSERVER_InferenceTrace and TraceManager in Triton;
golden 60.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import Any, Final, Literal, Protocol

from ..tensors import Tensor


class TraceLevel(IntFlag):
    OFF = 0
    TIMESTAMPS = 1
    TENSORS = 2

    @property
    def names(self) -> list[str]:
        """The levels' names in the protocol."""
        return [level.name or "" for level in (TraceLevel.TIMESTAMPS, TraceLevel.TENSORS) if level in self] or ["OFF"]


TraceMode = Literal["triton", "opentelemetry"]
TraceField = Literal["level", "rate", "count", "log_frequency"]
TraceChanges = Mapping[TraceField, TraceLevel | int | None]
"""New values. None = inherit again; an absent field does not change."""

UNLIMITED_COUNT: Final = -1


@dataclass(frozen=True, kw_only=True)
class OpenTelemetryOptions:
    """`--trace-config opentelemetry,…`.

    url: where spans are sent; "" = the exporter's default, http://localhost:4318/v1/traces
    uses_grpc: whether OTLP is sent over gRPC rather than HTTP
    resource: attributes of the spans' resource
    bsp_max_queue_size: spans waiting to be sent; more are dropped
    bsp_max_export_batch_size: spans
    """

    url: str = ""
    uses_grpc: bool = False
    resource: Mapping[str, str] = field(default_factory=dict)
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay_ms: int = 5000
    bsp_max_export_batch_size: int = 512

    def shown(self) -> dict[str, str]:
        """The options as the trace setting endpoints show them."""
        shown = {"url": self.url} if self.url else {}
        if self.resource:
            shown["resource"] = ",".join(f"{key}={value}" for key, value in self.resource.items())
        return shown | {
            "bsp_max_queue_size": str(self.bsp_max_queue_size),
            "bsp_schedule_delay": str(self.bsp_schedule_delay_ms),
            "bsp_max_export_batch_size": str(self.bsp_max_export_batch_size),
        }


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """The settings of the server or of one model.

    rate: every rate-th request is traced
    count: traces still to be collected; -1 = no limit
    log_frequency: traces per numbered file; 0 = all in `file` itself
    file: path; mode triton only
    """

    level: TraceLevel = TraceLevel.OFF
    rate: int = 1000
    count: int = UNLIMITED_COUNT
    log_frequency: int = 0
    file: str = ""
    mode: TraceMode = "triton"
    open_telemetry: OpenTelemetryOptions = field(default_factory=OpenTelemetryOptions)

    def fault(self) -> str:
        """Why no request can be sampled, `count` aside; "" = requests can be sampled."""
        if self.level is TraceLevel.OFF:
            return "tracing is disabled"
        if self.rate == 0:
            return "sample rate must be non-zero"
        if self.mode == "triton" and not self.file:
            return "trace file name is not given"
        return ""

    def with_changes(self, own: Mapping[TraceField, Any]) -> TraceSettings:
        return replace(self, **{str(name): value for name, value in own.items()})


def changed(own: Mapping[TraceField, Any], changes: TraceChanges) -> dict[TraceField, Any]:
    """The fields set for a model or the server, after applying `changes`."""
    merged = {**own, **changes}
    return {name: value for name, value in merged.items() if value is not None}


AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """ns: monotonic."""

    name: str
    ns: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A part of a model's work for a request. Times are monotonic ns."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    is_error: bool = False


log = logging.getLogger(__name__)

MAX_REPORTS: Final = 4096
"""Models' parts of one trace, and entries of each: further requests to models and responses are not recorded."""
MAX_SPANS: Final = 1024
"""Limit for one backend in one trace."""


class TraceSink(Protocol):
    """Destination of traces. Called without the trace's lock; `complete` is called once for each `begin`.

    takes_spans: whether it accepts spans from backends
    """

    takes_spans: bool

    def begin(self, trace: Trace) -> None:
        """Called when a request is sampled. May set `trace.traceparent`, for the client."""

    def begin_model(self, report: RequestTrace, start_ns: int) -> None:
        """Called when a model gets the request. May set `report.context`, for the backend."""

    def complete(self, trace: Trace) -> None: ...


class Trace:
    """One sampled request. It is complete, and passed to its sink, once its frontend has closed it and every model
    involved has ended its request. Tensors become text at once, because clients may overwrite their memory."""

    def __init__(
        self,
        level: TraceLevel,
        sink: TraceSink,
        new_id: Callable[[], int],
        on_complete: Callable[[], None],
        parent_context: Any = None,
    ) -> None:
        """parent_context: the client's trace context (OpenTelemetry)."""
        self.level = level
        self.sink = sink
        self.parent_context = parent_context
        self._new_id = new_id
        self._on_complete = on_complete
        self._lock = threading.Lock()
        self._open = 1
        self.root_span: Any = None
        self.wall_clock_offset_ns = 0
        """Both for use by the sink."""
        self.traceparent = ""
        """W3C's name of the root span (mode opentelemetry), or ""."""
        self.root = RequestTrace(self, new_id(), None)
        self._reports = [self.root]
        sink.begin(self)

    @property
    def reports(self) -> list[RequestTrace]:
        """First that of the frontend and its model, then those of composing models."""
        with self._lock:
            return list(self._reports)

    def child_of(self, parent: RequestTrace) -> RequestTrace | None:
        """None if there are MAX_REPORTS reports."""
        with self._lock:
            if len(self._reports) >= MAX_REPORTS:
                return None
            report = RequestTrace(self, self._new_id(), parent)
            self._reports.append(report)
            return report

    def enter(self) -> bool:
        """Adds a model. Returns False if the trace is already complete."""
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
            log.exception("a trace is lost")  # the request continues
        self._on_complete()


class RequestTrace:
    """One model's part of a trace; the root also contains the frontend's part. A request to another model on behalf of
    this one is traced with `child()`.

    context: for the backend: the model's span as a JSON object with `traceparent` (mode opentelemetry), or ""
    span: for the sink
    items: (monotonic ns, activity, tensor or None), in the order of reports
    spans, attributes: from the backend
    error_type: the status of the model's last error; "" = none
    """

    def __init__(self, trace: Trace, trace_id: int, parent: RequestTrace | None) -> None:
        self.trace = trace
        self.id = trace_id
        self.parent = parent
        self.model_name = ""
        self.model_version = 0
        self.request_id = ""
        self.context = ""
        self.span: Any = None
        self.items: list[tuple[int, str, dict[str, str] | None]] = []
        self.spans: list[TraceSpan] = []
        self.attributes: dict[str, Any] = {}
        self.error_type = ""
        self._times = TraceLevel.TIMESTAMPS in trace.level
        self._tensors = TraceLevel.TENSORS in trace.level
        self._is_closed = False
        self._is_running = False

    @property
    def parent_id(self) -> int:
        """0 = the client's request."""
        return 0 if self.parent is None else self.parent.id

    def child(self) -> RequestTrace | None:
        """The trace of a request made on behalf of this one; None = it is not traced, because the trace is full."""
        return self.trace.child_of(self)

    # --- backends -----------------------------------------------------------------------------------------------------

    @property
    def takes_spans(self) -> bool:
        """Whether spans and attributes from a backend are accepted."""
        return self._times and self.trace.sink.takes_spans

    def add_span(self, span: TraceSpan) -> None:
        """Must be called before the request is released."""
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)

    def set_attributes(self, attributes: Attributes) -> None:
        """Sets attributes of the model's span. Must be called before the request is released."""
        self.attributes.update(attributes)

    # --- frontends --------------------------------------------------------------------------------------------------

    def mark(self, activity: str, ns: int = 0) -> None:
        """Records `activity` at `ns` (monotonic), or now."""
        if self._times:
            self.items.append((ns or time.monotonic_ns(), activity, None))

    def close(self) -> None:
        """Called when the frontend has sent its last byte. For the root only; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.trace.leave()

    # --- the core ---------------------------------------------------------------------------------------------------

    def begin(self, model_name: str, model_version: int, request_id: str, start_ns: int) -> None:
        """Called when a model takes the request. `end` must follow."""
        self.model_name, self.model_version, self.request_id = model_name, model_version, request_id
        self._is_running = self.trace.enter()
        if self._is_running:
            self.trace.sink.begin_model(self, start_ns)
            self.mark("REQUEST_START", start_ns)

    def record_inputs(self, tensors: Iterable[Tensor]) -> None:
        self._report_tensors("TENSOR_QUEUE_INPUT", tensors)

    def queued(self, ns: int) -> None:
        """The request was queued at `ns`; 0 = never."""
        if ns:
            self.mark("QUEUE_START", ns)

    def computed(self, exec_start_ns: int, compute_start_ns: int, compute_end_ns: int, exec_end_ns: int) -> None:
        self.mark("COMPUTE_START", exec_start_ns)
        self.mark("COMPUTE_INPUT_END", compute_start_ns)
        self.mark("COMPUTE_OUTPUT_START", compute_end_ns)
        self.mark("COMPUTE_END", exec_end_ns)

    def responded(self, outputs: Iterable[Tensor], error_type: str = "") -> None:
        """error_type: the status of the response's error; "" = none."""
        self.error_type = error_type or self.error_type
        if len(self.items) >= MAX_REPORTS:
            return
        self._report_tensors("TENSOR_BACKEND_OUTPUT", outputs)
        if self.parent is None:  # a composing model does not respond to the client
            self.mark("INFER_RESPONSE_COMPLETE")

    def end(self) -> None:
        """The model has finished the request."""
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


def tensor_fields(tensor: Tensor) -> dict[str, str]:
    """A tensor as written by TraceManager::TraceTensorActivity: strings, numbers with six significant digits.
    Deliberate difference: UINT8, FP16 and BF16 are written as numbers, and the JSON is valid for any bytes."""
    return {
        "name": tensor.name,
        "data": ",".join(map(_formatter(tensor.datatype), tensor.data.ravel().tolist())),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }


def _formatter(datatype: str) -> Any:
    if datatype == "BYTES":
        return lambda value: f'"{value.decode("utf-8", "replace") if isinstance(value, bytes) else value}"'
    if datatype.startswith(("FP", "BF")):
        return lambda value: f"{value:g}"
    return lambda value: str(int(value))
