"""Errors in the shape that OpenAI's clients parse, and the way from Triton's codes to HTTP statuses.

For: every module of this frontend. Does not know: which endpoint failed. Invariant: whatever goes wrong, the client
gets `{"error": {"message", "type", "param", "code"}}`, as a response body or, once a stream has begun, as its last
event.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
from starlette.responses import Response

from llmbackend.core.errors import ErrorCode, TritonError, shown
from llmbackend.frontends.bug_log import log_bug
from llmbackend.frontends.limits import RETRY_AFTER_S, LimitReachedError

INVALID_REQUEST = "invalid_request_error"
_STATUS_TYPE_CODE: dict[ErrorCode, tuple[int, str, str | None]] = {
    ErrorCode.INVALID_ARG: (400, INVALID_REQUEST, None),
    ErrorCode.UNSUPPORTED: (400, INVALID_REQUEST, "unsupported"),
    ErrorCode.ALREADY_EXISTS: (409, INVALID_REQUEST, None),
    ErrorCode.NOT_FOUND: (404, INVALID_REQUEST, "not_found"),
    ErrorCode.UNAVAILABLE: (503, "service_unavailable_error", "unavailable"),
    ErrorCode.CANCELLED: (499, "request_cancelled", "cancelled"),
    ErrorCode.INTERNAL: (500, "server_error", None),
    ErrorCode.UNKNOWN: (500, "server_error", None),
}

_BLAMED = re.compile(r"parameter '(\w+)'")
"""How the host's messages name a sampling parameter; its name is the field's name here."""


class OpenAIError(Exception):
    """A refusal. `param` names the request's field, in the client's words (`messages[0].role`), when one is to
    blame."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        kind: str = INVALID_REQUEST,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.kind = kind
        self.retry_after = RETRY_AFTER_S

    @classmethod
    def of(cls, error: Exception) -> OpenAIError:
        """`error` as the client may see it; an exception nobody foresaw is logged and shown as a bare 500."""
        if isinstance(error, OpenAIError):
            return error
        if isinstance(error, LimitReachedError):
            limited = cls(error.message, status=429, kind=error.kind, code="rate_limit_exceeded")
            limited.retry_after = error.retry_after
            return limited
        if isinstance(error, TritonError):
            status, kind, code = _STATUS_TYPE_CODE[error.code]
            blamed = _BLAMED.search(error.message) if status == 400 else None
            return cls(error.message, param=blamed and blamed[1], status=status, kind=kind, code=code)
        log_bug("unexpected error in the OpenAI frontend", error)
        return cls("internal server error", status=500, kind="server_error")

    def body(self) -> bytes:
        fields: dict[str, Any] = {
            "message": self.message.encode("utf-8", "replace").decode(),  # a backend's text may hold lone surrogates
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": fields})

    def response(self) -> Response:
        headers = {"Retry-After": self.retry_after} if self.status in (429, 503) else {}
        return Response(self.body(), self.status, headers, media_type="application/json")

    def event(self) -> bytes:
        """The error as the last event of a stream."""
        return b"data: " + self.body() + b"\n\n"


def refuse(param: str, expectation: str, value: object) -> OpenAIError:
    """A 400 that names field, value and what was expected."""
    return OpenAIError(f"'{param}' is {shown(value)}, expected {expectation}", param=param, code="invalid_value")


def model_not_found(name: str) -> OpenAIError:
    return OpenAIError(f"The model '{name}' does not exist", param="model", code="model_not_found", status=404)
