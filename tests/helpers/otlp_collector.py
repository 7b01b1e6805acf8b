"""Collectors of OpenTelemetry spans, for tests: OTLP over HTTP or gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Spans:
    """What was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []

    def add(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            self.resources.append({item.key: item.value.string_value for item in group.resource.attributes})
            self.spans += [span for scope in group.scope_spans for span in scope.spans]

    def named(self, name: str) -> Any:
        (span,) = [span for span in self.spans if span.name == name]
        return span


class Collector(Spans, ThreadingHTTPServer):
    """Keeps the spans that are posted to /v1/traces."""

    def __init__(self) -> None:
        Spans.__init__(self)
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.add(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


class GrpcCollector(Spans, TraceServiceServicer):
    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        self.add(request)
        return ExportTraceServiceResponse()


@contextmanager
def collecting_by_grpc() -> Iterator[tuple[GrpcCollector, int]]:
    """The collector and its port."""
    server, collector = grpc.server(ThreadPoolExecutor(1)), GrpcCollector()
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, port
    server.stop(None).wait()


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def events(span: Any) -> list[str]:
    return [event.name for event in span.events]
