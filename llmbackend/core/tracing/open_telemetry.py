"""Traces as OpenTelemetry spans, sent in batches to a collector by OTLP over HTTP or gRPC.

The SDK is imported only in mode opentelemetry. A slow or absent collector does not delay requests.
Source: Triton's tracer and its settings of the batch span processor.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from ..errors import unsupported
from .trace import MAX_REPORTS, OpenTelemetryOptions, RequestTrace, Trace, TraceSpan

try:
    from opentelemetry import trace as api
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise unsupported(
        f"trace mode opentelemetry needs the OpenTelemetry SDK ({error.name} is missing): "
        "pip install 'llmbackend[opentelemetry]'"
    ) from None

if TYPE_CHECKING:
    from opentelemetry.trace import Span

CLOSE_TIMEOUT_S = 5.0
"""How long `close` waits for an unresponsive collector."""
SERVICE_NAME: Final = "triton-inference-server"
ROOT_SPAN: Final = "InferRequest"
_TRACER: Final = "triton-server"
_COMPUTE: Final = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
_MODEL: Final = ("REQUEST_START", "QUEUE_START", "REQUEST_END")
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_CARRIED: Final = ("traceparent", "tracestate")
_LIMITS: Final = SpanLimits(max_events=2 * MAX_REPORTS)
"""The default of 128 events would drop the first ones."""


class OpenTelemetrySink:
    """A TraceSink.

    Spans: `InferRequest` > one per model > `compute`, all of kind server with attributes `triton.*`; the backend's own
    spans are siblings of `compute` and of kind internal. A client's `traceparent` is the parent of the first. The
    provider is not the process's global one. The SDK's thread sends spans; it drops and logs those beyond its queue.
    """

    takes_spans = True

    def __init__(self, options: OpenTelemetryOptions) -> None:
        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": SERVICE_NAME}
        resource = Resource.create(name | dict(options.resource))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, span_limits=_LIMITS)
        self._exporter = _exporter(options)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=options.bsp_max_queue_size,
                schedule_delay_millis=options.bsp_schedule_delay_ms,
                max_export_batch_size=options.bsp_max_export_batch_size,
            )
        )
        self._tracer = self._provider.get_tracer(_TRACER)

    def parent_of(self, header: Callable[[str], str | None]) -> Context | None:
        carrier = {name: value for name in _CARRIED if (value := header(name))}
        if "traceparent" not in carrier:
            return None
        context = _PROPAGATOR.extract(carrier)
        return context if api.get_current_span(context).get_span_context().is_valid else None

    def begin(self, trace: Trace) -> None:
        trace.wall_clock_offset_ns = time.time_ns() - time.monotonic_ns()  # steps of the clock change it
        trace.root_span = self._start(trace, ROOT_SPAN, time.monotonic_ns(), trace.parent_context or Context())
        trace.traceparent = _carrier(trace.root_span)["traceparent"]

    def begin_model(self, report: RequestTrace, start_ns: int) -> None:
        parent = None if report.parent is None else report.parent.span
        trace = report.trace
        report.span = self._start(trace, report.model_name, start_ns, _below(parent or trace.root_span))
        attributes = {
            "triton.model_name": report.model_name,
            "triton.model_version": report.model_version,
            "triton.trace_id": report.id,
            "triton.trace_parent_id": report.parent_id,
        }
        report.span.set_attributes(attributes | ({"triton.request_id": report.request_id} if report.request_id else {}))
        report.context = json.dumps(_carrier(report.span))

    def complete(self, trace: Trace) -> None:
        for report in trace.reports:
            self._complete_model(report)
        rest = {activity for _, activity, _ in trace.root.items} - {*_MODEL, *_COMPUTE}
        _end(trace, trace.root_span, _marks(trace.root, rest))

    def close(self) -> None:
        """Sends waiting spans for up to CLOSE_TIMEOUT_S; those left are dropped."""
        deadline = threading.Timer(CLOSE_TIMEOUT_S, self._exporter.shutdown)
        deadline.start()
        self._provider.shutdown()
        deadline.cancel()
        deadline.join()

    def _complete_model(self, report: RequestTrace) -> None:
        if report.span is None:
            return
        model, compute = _marks(report, _MODEL), _marks(report, _COMPUTE)
        if compute:
            span = self._start(report.trace, "compute", compute[0][0], _below(report.span))
            _end(report.trace, span, compute)
        for told in report.spans:
            self._add(report.trace, told, report.span)
        report.span.set_attributes(report.attributes)
        if report.error_type:
            report.span.set_attribute("error.type", report.error_type)
            report.span.set_status(api.StatusCode.ERROR)
        _end(report.trace, report.span, model)

    def _add(self, trace: Trace, told: TraceSpan, parent: Span) -> None:
        """Adds a backend's span."""
        start_ns, attributes = told.start_ns + trace.wall_clock_offset_ns, dict(told.attributes)
        span = self._tracer.start_span(told.name, context=_below(parent), attributes=attributes, start_time=start_ns)
        for event in told.events:
            span.add_event(event.name, dict(event.attributes), timestamp=event.ns + trace.wall_clock_offset_ns)
        if told.is_error:
            span.set_status(api.StatusCode.ERROR)
        span.end(told.end_ns + trace.wall_clock_offset_ns)

    def _start(self, trace: Trace, name: str, ns: int, context: Context) -> Span:
        kind, wall_ns = api.SpanKind.SERVER, ns + trace.wall_clock_offset_ns
        return self._tracer.start_span(name, context=context, kind=kind, start_time=wall_ns)


def _end(trace: Trace, span: Span, marks: list[tuple[int, str]]) -> None:
    for ns, name in marks:
        span.add_event(name, timestamp=ns + trace.wall_clock_offset_ns)
    span.end((marks[-1][0] if marks else time.monotonic_ns()) + trace.wall_clock_offset_ns)


def _exporter(options: OpenTelemetryOptions) -> SpanExporter:
    url = _with_scheme(options.url) or None
    if not options.uses_grpc:
        return OTLPSpanExporter(endpoint=url)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter
    except ImportError as error:
        missing = f"traces over gRPC need OpenTelemetry's exporter ({error.name} is missing)"
        raise unsupported(f"{missing}: pip install 'llmbackend[opentelemetry]'") from None
    return GrpcSpanExporter(endpoint=url)


def _with_scheme(url: str) -> str:
    """Accepts `localhost:4318/v1/traces`, as Triton's exporter does, and vLLM's `grpc://localhost:4317`."""
    return re.sub("^grpc(s?)://", r"http\1://", f"http://{url}" if url and "://" not in url else url)


def _marks(report: RequestTrace, names: Collection[str]) -> list[tuple[int, str]]:
    """The marks with these names, ordered by time (stable)."""
    return sorted(((ns, name) for ns, name, _ in report.items if name in names), key=lambda mark: mark[0])


def _carrier(span: Span) -> dict[str, str]:
    """A span's W3C headers."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, _below(span))
    return carrier


def _below(span: Span) -> Context:
    return api.set_span_in_context(span, Context())
