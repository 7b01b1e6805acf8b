"""How a unary RPC ends when its handler raises.

For: the gRPC servicers. Does not know: RPCs. Invariant: a TritonError becomes the status of its code with its text
unchanged; a bug of ours is logged, and told without detail.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from llmbackend.core.errors import TritonError

from .bug_log import log_bug
from .grpc_errors import INTERNAL_ERROR, grpc_status, grpc_trailers

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def rpc(handler: Handler) -> Handler:
    """`handler(self, request, context)` as an RPC."""

    @functools.wraps(handler)
    async def guarded(self: Any, request: Any, context: Any) -> Any:
        try:
            return await handler(self, request, context)
        except TritonError as error:
            await context.abort(grpc_status(error), error.message, grpc_trailers(error))
        except Exception as error:
            log_bug(f"{handler.__name__} failed", error)
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL_ERROR)

    return guarded  # type: ignore[return-value]
