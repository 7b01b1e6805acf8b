"""Frontend errors that have no Triton error code of their own, and logging of internal errors.

Each protocol derives statuses and bodies from these types (core/errors.py shows the whole tree). Invariant: client data
is logged only at debug level, and so is the text of an unexpected exception, which may quote it.
"""

from __future__ import annotations

import logging
import traceback
from typing import Final

from llmbackend.core.errors import ErrorCode, TritonError, invalid_argument
from llmbackend.core.server_log import CAUSE, cause_of

RETRY_AFTER_S: Final = "1"
"""Retry-After of a refusal at a limit: one decode step may already free capacity."""
_INCREASE: Final = "Use --http-max-input-size to increase the limit."
log = logging.getLogger(__name__)


class LimitReachedError(TritonError):
    """A server limit is reached: HTTP 429, gRPC RESOURCE_EXHAUSTED, Triton code UNAVAILABLE."""

    def __init__(self, message: str, retry_after: str = RETRY_AFTER_S, kind: str = "requests") -> None:
        """kind: OpenAI's type of the error"""
        super().__init__(message, ErrorCode.UNAVAILABLE)
        self.retry_after = retry_after
        self.kind = kind


class PermissionDeniedError(TritonError):
    """The client lacks permission: HTTP 403, gRPC PERMISSION_DENIED, Triton code UNAVAILABLE."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)


class UnauthenticatedError(TritonError):
    """The API key of an open gRPC stream is no longer valid: UNAUTHENTICATED, Triton code UNAVAILABLE."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ErrorCode.UNAVAILABLE)


class BodyTooLargeError(TritonError):
    """An HTTP body is longer than --http-max-input-size. INVALID_ARG."""

    text = "request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes"

    def __init__(self, size_bytes: int, max_bytes: int) -> None:
        text = self.text.format(size=size_bytes, limit=max_bytes)
        super().__init__(f"{text}. {_INCREASE}", ErrorCode.INVALID_ARG)
        self.size_bytes = size_bytes


class UnpackedBodyTooLargeError(BodyTooLargeError):
    """A compressed HTTP body exceeds --http-max-input-size after decompression. INVALID_ARG."""

    text = "Decompressed data size exceeds the maximum allowed value of {limit} bytes"


def input_too_large(what: str, size_bytes: int, max_bytes: int) -> TritonError:
    """An input of /infer exceeds --http-max-input-size. what: beginning of the message"""
    return invalid_argument(
        f"{what} has a byte_size ({size_bytes} bytes) that exceeds the maximum allowed value of {max_bytes} bytes. "
        f"{_INCREASE}"
    )


class MalformedError(TritonError):
    """A gRPC message that cannot be parsed. INTERNAL."""


def log_bug(what: str, error: BaseException) -> None:
    """Logs the stack of `error` and its causes as one error line, at most once a minute per cause."""
    places = "".join(
        f"{type(cause).__name__}:\n{''.join(traceback.format_tb(cause.__traceback__))}" for cause in _chain(error)
    )
    log.error("%s: %s", what, places.rstrip(), extra={CAUSE: cause_of(error)})
    log.debug("%s: %s", what, error)


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain[::-1]
