"""Bytes that are not the message an RPC takes: INTERNAL "Unable to parse request", as Triton answers.

For: the gRPC server. Does not know: any message. Without it grpc.aio answers UNKNOWN and logs a traceback for what is a
client's mistake. Invariant: handlers of unary RPCs never see a `Malformed`; a stream's handler may, and asks `check`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from llmbackend.core.errors import internal


class Malformed:
    """Stands where a request would have stood."""


def check(request: Any) -> None:
    """Raises TritonError INTERNAL if `request` was no message."""
    if isinstance(request, Malformed):
        raise internal("Unable to parse request")


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Gives every handler a parser that does not raise."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        changes: dict[str, Any] = {"request_deserializer": _tolerant(handler.request_deserializer)}
        if handler.unary_unary is not None:
            changes["unary_unary"] = _refusing(handler.unary_unary)
        return handler._replace(**changes)


def _tolerant(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Malformed()

    return parse_or_mark


def _refusing(handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def refuse_malformed(request: Any, context: Any) -> Any:
        if isinstance(request, Malformed):
            await context.abort(grpc.StatusCode.INTERNAL, "Unable to parse request")
        return await handler(request, context)

    return refuse_malformed
