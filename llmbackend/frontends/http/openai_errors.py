"""Errors in the shape that OpenAI's clients parse, and the way from Triton's codes to HTTP statuses.

For: every API of text. Does not know: which endpoint failed. Invariant: for every failure the client gets
`{"error": {"message", "type", "param", "code"}}`, as a response body or, once a stream has begun, as its last event.
"""

from __future__ import annotations

import json
import re
import reprlib
from typing import Any

from starlette.responses import Response

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.frontends.errors import RETRY_AFTER_S, LimitReachedError, log_bug
from llmbackend.frontends.http.errors import INVALID_REQUEST, openai_error_body

JsonObject = dict[str, Any]
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
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_TOO_LONG = re.compile(
    r"^(the prompt|input 'messages') has \d+ [\w ]+, expected at most"
    r"|maximum (context|model) length",
    re.IGNORECASE,
)
"""Texts of models for a request that exceeds the context: vLLM's words, which clients such as LiteLLM look for."""


class OpenAIError(Exception):
    """An error as the client gets it."""

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
        """The request's field that is wrong, as a path (`messages[0].role`)."""
        self.code = code
        self.status = status
        """HTTP status."""
        self.kind = kind
        """OpenAI's `type`."""
        self.retry_after = RETRY_AFTER_S
        """Seconds, for the header of a 429 or 503."""

    @classmethod
    def of(cls, error: Exception) -> OpenAIError:
        """`error` as the client may see it; an unexpected exception is logged, and shown as a 500 without details."""
        if isinstance(error, OpenAIError):
            return error
        if isinstance(error, LimitReachedError):
            limited = cls(error.message, status=429, kind=error.kind, code="rate_limit_exceeded")
            limited.retry_after = error.retry_after
            return limited
        if isinstance(error, TritonError):
            status, kind, code = _STATUS_TYPE_CODE[error.code]
            if status == 400 and _TOO_LONG.search(error.message):
                code = CONTEXT_LENGTH_EXCEEDED
            return cls(error.message, param=error.param if status == 400 else None, status=status, kind=kind, code=code)
        log_bug("unexpected error in the OpenAI frontend", error)
        return cls("internal server error", status=500, kind="server_error")

    def body(self) -> bytes:
        return openai_error_body(self.message, self.kind, self.code, self.param)

    def response(self) -> Response:
        headers = {"Retry-After": self.retry_after} if self.status in (429, 503) else {}
        return Response(self.body(), self.status, headers, media_type="application/json")

    def event(self) -> bytes:
        """The error as the last event of a stream."""
        return b"data: " + self.body() + b"\n\n"


class _AsJson(reprlib.Repr):
    """Values as their sender wrote them, shortened."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 80, 80

    def repr_str(self, value: str, level: int) -> str:
        text = value if len(value) <= self.maxstring else f"{value[:30]}...{value[-30:]}"
        return json.dumps(text, ensure_ascii=False)

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


_AS_JSON = _AsJson()


def as_json(value: object) -> str:
    """`value` as a message quotes it: as JSON, shortened."""
    return _AS_JSON.repr(value)


def refuse(param: str, expectation: str, value: object) -> OpenAIError:
    """A 400 that names field, value and what was expected."""
    return OpenAIError(f"'{param}' is {as_json(value)}, expected {expectation}", param=param, code="invalid_value")


def requires(param: str, condition: str) -> OpenAIError:
    """A 400 for a field that is sent without what it depends on."""
    return OpenAIError(f"'{param}' requires {condition}", param=param, code="invalid_value")


def missing(param: str) -> OpenAIError:
    """A 400 for a required field that was left out or null."""
    return OpenAIError(f"missing required field '{param}'", param=param, code="missing_required_parameter")


def model_not_found(name: str) -> OpenAIError:
    return OpenAIError(f"The model '{name}' does not exist", param="model", code="model_not_found", status=404)
