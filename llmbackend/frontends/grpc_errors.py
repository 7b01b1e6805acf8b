"""Which gRPC status a Triton code has, and what a client is told of a bug of ours.

For: the gRPC servicers. Does not know: RPCs. Source: Triton's grpc_utils.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc

from llmbackend.core.errors import ErrorCode, TritonError

from .limits import LimitReachedError, PermissionDeniedError

INTERNAL_ERROR: Final = "internal error, see the server's log"

GRPC_STATUS: Final[Mapping[ErrorCode, grpc.StatusCode]] = {
    ErrorCode.UNKNOWN: grpc.StatusCode.UNKNOWN,
    ErrorCode.INTERNAL: grpc.StatusCode.INTERNAL,
    ErrorCode.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    ErrorCode.INVALID_ARG: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorCode.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.UNSUPPORTED: grpc.StatusCode.UNIMPLEMENTED,
    ErrorCode.ALREADY_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    ErrorCode.CANCELLED: grpc.StatusCode.CANCELLED,
}


def grpc_status(error: TritonError) -> grpc.StatusCode:
    if isinstance(error, LimitReachedError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    if isinstance(error, PermissionDeniedError):
        return grpc.StatusCode.PERMISSION_DENIED
    return GRPC_STATUS[error.code]


def grpc_trailers(error: TritonError) -> tuple[tuple[str, str], ...]:
    """Metadata behind the status: when to try again."""
    return (("retry-after", error.retry_after),) if isinstance(error, LimitReachedError) else ()
