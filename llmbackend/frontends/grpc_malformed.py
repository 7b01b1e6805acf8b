"""Bytes that are not the message an RPC takes: INTERNAL "Unable to parse request", as Triton answers.

For: the gRPC server, to which services are added through `tolerant`. Does not know: any message. Without it grpc.aio
answers UNKNOWN and logs a traceback for what is a client's mistake. Invariants: handlers of unary RPCs never see a
`Malformed`; a stream's handler may, and asks `check`; handlers are wrapped once, when they are added (an interceptor
would do it for each call).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from llmbackend.core.errors import TritonError

from .control_body import MOST_CONTROL_BYTES, too_large

UNABLE: Final = "Unable to parse request"


class Malformed:
    """Stands where a request would have stood."""


class _Oversized:
    """Likewise."""


class MalformedError(TritonError):
    """INTERNAL."""


def check(request: Any) -> None:
    """Raises MalformedError if `request` was no message."""
    if isinstance(request, Malformed):
        raise MalformedError(UNABLE)


class TolerantServices:
    """What a generated `add_…Servicer_to_server` takes for a server: hands the handlers on, each with a parser that
    does not raise.

    They come twice, and are handed on once, as generic handlers: for each registered method grpc.aio keeps a task of
    its own, and looks at all of them for every call of any (with 24 methods a seventh of a small RPC's time)."""

    def __init__(self, server: grpc.aio.Server, parsers: Mapping[str, Callable[[bytes], Any]]) -> None:
        """`parsers`: of methods whose messages may be large; they raise DecodeError."""
        self._server = server
        self._parsers = parsers

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same that come by their names."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        tolerant = {name: _tolerant(handler, self._parsers.get(name)) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, tolerant),))


def _tolerant(handler: Any, parse: Callable[[bytes], Any] | None) -> Any:
    changes: dict[str, Any] = {"request_deserializer": _marking(parse or _parsing_small(handler.request_deserializer))}
    if handler.unary_unary is not None:
        changes["unary_unary"] = _refusing(handler.unary_unary)
    return handler._replace(**changes)


def _parsing_small(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    return lambda data: parse(data) if len(data) <= MOST_CONTROL_BYTES else _Oversized()


def _marking(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse_or_mark(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Malformed()

    return parse_or_mark


def _refusing(handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def refuse_malformed(request: Any, context: Any) -> Any:
        if isinstance(request, Malformed):
            await context.abort(grpc.StatusCode.INTERNAL, UNABLE)
        if isinstance(request, _Oversized):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, too_large().message)
        return await handler(request, context)

    return refuse_malformed
