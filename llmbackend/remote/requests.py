"""InferenceRequests as messages, and traces of requests that frontends send.

Used by RemoteServer (`packed_request`) and HostEndpoint (`unpacked_request`). Independent of links. Invariant: a
request arrives unchanged, except for its trace, which the host creates if it samples the request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

from llmbackend.core.errors import invalid_argument
from llmbackend.core.messages import NO_FLAGS, InferenceRequest, RequestFlag, Resume
from llmbackend.core.requests.request_validation import check_request
from llmbackend.core.tensors import RawTensor
from llmbackend.core.tracing.manager import HeaderLookup
from llmbackend.core.tracing.trace import RequestTrace, Trace, TraceLevel

from .wire import Frame, Submit, TraceStart, elements, encode, packed, unpacked


def packed_request(
    number: int, request: InferenceRequest, *, is_confirmed: bool, trace: TraceStart | None, resume: Resume | None
) -> list[Frame]:
    """Returns header and frames. resume: replaces the request's own. Raises TritonError INVALID_ARG for a request
    beyond the host's bounds, and for values that cannot be represented in a message."""
    check_request(request)
    frames: list[Frame] = []
    raw = request.raw_input
    try:
        header = encode(
            Submit(
                number,
                is_confirmed,
                request.model_name,
                request.model_version,
                request.id,
                tuple([packed(tensor, frames) for tensor in request.inputs]),
                request.requested_outputs,
                dict(request.parameters),
                request.correlation_id,
                int(request.flags),
                request.priority,
                request.timeout_us,
                None if raw is None else packed(RawTensor("", "", (), raw), frames),
                request.shared_inputs,
                dict(request.shared_outputs),
                dict(request.classes),
                request.tenant,
                trace,
                resume,
                request.command,
            )
        )
    except (OverflowError, UnicodeEncodeError) as error:
        raise invalid_argument(f"the request has a number beyond 64 bits or text that is not UTF-8: {error}") from None
    return [header, *frames]


def unpacked_request(submit: Submit, frames: Sequence[Frame]) -> InferenceRequest:
    """Takes time proportional to the number of strings. Raises TritonError INVALID_ARG if elements and shape differ."""
    raw = submit.raw_input
    return InferenceRequest(
        model_name=submit.model_name,
        model_version=submit.model_version,
        id=submit.id,
        inputs=tuple([unpacked(tensor, frames) for tensor in submit.inputs]),
        requested_outputs=submit.requested_outputs,
        parameters=submit.parameters,
        correlation_id=submit.correlation_id,
        flags=RequestFlag(submit.flags) if submit.flags else NO_FLAGS,
        priority=submit.priority,
        timeout_us=submit.timeout_us,
        raw_input=None if raw is None else bytes(elements(raw, frames)),
        shared_inputs=submit.shared_inputs,
        shared_outputs=submit.shared_outputs,
        classes=submit.classes,
        tenant=submit.tenant,
        resume=submit.resume,
        command=submit.command,
    )


_TRACE_HEADERS: Final = ("traceparent", "tracestate")


class _FrontendSink:
    """The TraceSink of one client request."""

    takes_spans = False

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers
        self.root_number = 0
        """Number of the root's submission; 0 = not submitted yet."""
        self.num_told = 0
        """How many of the root's marks have been sent to the host."""
        self.end: Callable[[list[tuple[int, str]]], None] = lambda items: None

    def begin(self, trace: Trace) -> None: ...
    def begin_model(self, report: RequestTrace, start_ns: int) -> None: ...

    def complete(self, trace: Trace) -> None:
        self.end(_items(trace.root)[self.num_told :])


class RemoteTracing:
    """is_idle: whether no attached host traces requests."""

    def __init__(self) -> None:
        self.is_idle = True
        self._ids = itertools.count(1)

    def sample(self, model_name: str, header: HeaderLookup) -> RequestTrace | None:
        """The trace for a client's new request, which the host may sample."""
        if self.is_idle:
            return None
        headers = {name: value for name in _TRACE_HEADERS if (value := header(name))}
        return Trace(TraceLevel.TIMESTAMPS, _FrontendSink(headers), lambda: next(self._ids), lambda: None).root


def begun(trace: RequestTrace, number: int, end: Callable[[list[tuple[int, str]]], None]) -> TraceStart:
    """To be sent with the submission `number` of the request of `trace`. end: called with the later marks when the
    frontend closes the trace."""
    sink = trace.trace.sink
    assert isinstance(sink, _FrontendSink), "made by RemoteTracing"
    if trace.parent is not None:
        return TraceStart({}, [], sink.root_number)
    items = _items(trace)
    sink.root_number, sink.num_told, sink.end = number, len(items), end
    return TraceStart(sink.headers, items)


def _items(trace: RequestTrace) -> list[tuple[int, str]]:
    return [(ns, activity) for ns, activity, _ in trace.items]
