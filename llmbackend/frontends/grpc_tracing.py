"""What a gRPC request adds to its trace, if it has one: when it was waited for and read, and when its answer was sent.

For: the gRPC servicer and streams. Does not know: models, where traces go. Source: GRPC_WAITREAD_START … GRPC_SEND_END
of Triton's grpc server. Messages are read before a handler sees them, so that here the reading ends when it is seen.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import grpc

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest
from llmbackend.core.tracing.trace import RequestTrace

Context = grpc.aio.ServicerContext[Any, Any]


def sampled(server: InferenceServer, model_name: str, context: Context, start_ns: int = 0) -> RequestTrace | None:
    """The trace of a request that was waited for since `start_ns` (monotonic, 0 = just now); None for most."""
    if server.tracing.is_idle:
        return None
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    trace = server.tracing.sample(model_name, metadata.get)
    if trace is not None:
        now_ns = time.monotonic_ns()
        trace.mark("GRPC_WAITREAD_START", start_ns or now_ns)
        trace.mark("GRPC_WAITREAD_END", now_ns)
    return trace


def with_trace(request: InferenceRequest, trace: RequestTrace | None) -> InferenceRequest:
    return request if trace is None else replace(request, trace=trace)


def close_when_sent(trace: RequestTrace, context: Context) -> None:
    """For an RPC with one answer: the end of the call ends the trace."""

    def sent(_: Any) -> None:
        trace.mark("GRPC_SEND_END")
        trace.close()

    context.add_done_callback(sent)  # type: ignore[arg-type]  # it is called with the context alone
