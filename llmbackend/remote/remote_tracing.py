"""RemoteTracing: traces of requests whose host is another process.

For: RemoteServer, and the frontends that use its `tracing`. Does not know: links. Invariants: the host decides which
requests are sampled; what the frontend marks goes to the host's trace, at most twice per request: with the request, and
when the frontend has sent its last byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Final

from llmbackend.core.tracing.manager import HeaderLookup
from llmbackend.core.tracing.settings import TraceLevel
from llmbackend.core.tracing.trace import RequestTrace, Trace

from .wire import TraceStart

_CLIENTS_OWN: Final = ("traceparent", "tracestate")


class _FrontendSink:
    """The TraceSink of one request. The host's numbers of its parts are those that they were submitted with."""

    takes_spans = False

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.root_number = 0
        """Of the root's submission; 0 before."""
        self.num_told = 0
        """How many of the root's marks the host has."""
        self.end: Callable[[list[tuple[int, str]]], None] = lambda items: None

    def begin(self, trace: Trace) -> None: ...
    def begin_model(self, report: RequestTrace, start_ns: int) -> None: ...

    def complete(self, trace: Trace) -> None:
        self.end(_items(trace.root)[self.num_told :])


class RemoteTracing:
    """is_idle: whether no host can sample a request at present"""

    def __init__(self) -> None:
        self.is_idle = True
        self._ids = itertools.count(1)

    def sample(self, model_name: str, header: HeaderLookup) -> RequestTrace | None:
        """The trace of a client's new request, which the host may or may not sample."""
        if self.is_idle:
            return None
        headers = {name: value for name in _CLIENTS_OWN if (value := header(name))}
        return Trace(TraceLevel.TIMESTAMPS, _FrontendSink(headers), lambda: next(self._ids), lambda: None).root


def begun(trace: RequestTrace, number: int, end: Callable[[list[tuple[int, str]]], None]) -> TraceStart:
    """The request of `trace` is submitted with `number`. `end` is called with the marks that follow, when the frontend
    closes the trace."""
    sink = trace.trace.sink
    assert isinstance(sink, _FrontendSink), "made by RemoteTracing"
    if trace.parent is not None:
        return TraceStart({}, [], sink.root_number)
    items = _items(trace)
    sink.root_number, sink.num_told, sink.end = number, len(items), end
    return TraceStart(sink.headers, items)


def _items(trace: RequestTrace) -> list[tuple[int, str]]:
    return [(ns, activity) for ns, activity, _ in trace.items]
