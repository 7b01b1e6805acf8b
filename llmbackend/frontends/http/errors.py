"""Errors over HTTP: the status of each Triton code, and error bodies in Triton's, OpenAI's and Anthropic's formats.

Independent of requests and models. Invariants: error bodies are Anthropic's under /v1/messages, OpenAI's under /v1/,
and `{"error": "<text>"}` elsewhere, including those with content type text/plain, which Triton sends if its handler has
not set a type yet (health, the checks before an /infer body). Once a stream has begun, an error is its last event.
Sources: Triton's HttpCodeFromError; content types recorded from Triton 2.51; Anthropic's API reference.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import (
    Any,
    Final,
    Literal,
    NotRequired,  # pydantic accepts typing.NotRequired only from Python 3.12 on
)

import orjson
from pydantic import with_config
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import TypedDict

from llmbackend.core.errors import ErrorCode, TritonError

from ..errors import RETRY_AFTER_S, LimitReachedError, PermissionDeniedError, log_bug
from .responses import JSON, TEXT, plain

INVALID_REQUEST: Final = "invalid_request_error"
"""OpenAI's error type for client errors."""
HTTP_STATUS: Final[Mapping[ErrorCode, int]] = {
    ErrorCode.UNKNOWN: 400,
    ErrorCode.INTERNAL: 500,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.INVALID_ARG: 400,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.UNSUPPORTED: 501,
    ErrorCode.ALREADY_EXISTS: 400,
    ErrorCode.CANCELLED: 400,
}
_ANTHROPIC_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
"""Anthropic's error types by status; all others are invalid_request_error (4xx) or api_error."""
_OPENAI_KINDS: Final = {429: ("requests", "rate_limit_exceeded"), 503: ("service_unavailable_error", "unavailable")}
"""OpenAI's type and code by status, for refusals at the connection level."""


@with_config(extra="allow")
class Error(TypedDict):
    error: str


class _OpenAIDetails(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(TypedDict):
    error: _OpenAIDetails


class _AnthropicDetails(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: _AnthropicDetails
    request_id: str | None


ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]
_PLAIN_405: Final = re.compile(r"/(live|ready|infer|metrics)/?$")
"""Paths for which Triton refuses a method before it sets a content type."""
STOPPING: Final = "Server is stopping"


def error_body(message: str) -> bytes:
    return orjson.dumps({"error": message})


def is_openai(path: str) -> bool:
    return path.startswith("/v1/") or path in ("/v1", "/invocations", "/tokenize", "/detokenize", "/tokenizer_info")


def is_anthropic(path: str, version: bytes | None = None) -> bool:
    """version: the header `anthropic-version`, which Anthropic's clients send when they list models"""
    if path.startswith("/v1/models"):
        return version is not None
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_error_body(
    status: int, message: str, request_id: str | None = None, details: Mapping[str, object] | None = None
) -> bytes:
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": message} | ({} if details is None else {"details": details})
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


def openai_error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_response(error: TritonError, content_type: str = JSON, headers: Mapping[str, str] | None = None) -> Response:
    """`error` in Triton's format, with Retry-After if a retry may succeed."""
    status = _status(error)
    response = plain(error_body(error.message), status, content_type)
    if status in (429, 503):
        response.headers["retry-after"] = getattr(error, "retry_after", RETRY_AFTER_S)
    response.headers.update(headers or {})
    return response


def _status(error: TritonError) -> int:
    if isinstance(error, LimitReachedError):
        return 429
    return 403 if isinstance(error, PermissionDeniedError) else HTTP_STATUS[error.code]


def install_error_handlers(app: Starlette) -> None:
    """Makes `app` answer exceptions, unknown paths and wrong methods in Triton's format."""
    for kind, handler in _HANDLERS:
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, _on_bug)


async def response_to(request: Request, error: Exception) -> tuple[Response, Exception | None]:
    """The response of such an app to `error`, and `error` if it is an internal error, to be raised afterwards."""
    for kind, handler in _HANDLERS:
        if isinstance(error, kind):
            return await handler(request, error), None
    return await _on_bug(request, error), error


async def _on_triton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TritonError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return plain(error_body("Not Found"), 404)
    if error.status_code == 405:
        content_type = TEXT if _PLAIN_405.search(request.url.path) else JSON
        return plain(error_body("Method Not Allowed"), 405, content_type)
    return plain(error_body(str(error.detail)), error.status_code, JSON)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return plain(status=400)  # the client has disconnected


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this response; it is logged then."""
    return plain(error_body("internal error, see the server's log"), 500, JSON)


_HANDLERS: Final[tuple[tuple[type[Exception], ErrorHandler], ...]] = (
    (TritonError, _on_triton_error),
    (HTTPException, _on_http_exception),
    (ClientDisconnect, _on_disconnect),
)


def refusing(status: int, message: str) -> ASGIApp:
    """An application that refuses every request and closes the connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(_body(scope["path"], status, message), status, _headers(status))(scope, receive, send)

    return app


def refusal_bytes(path: str, status: int, message: str) -> bytes:
    """The same refusal as bytes. path: "" if it is not known yet"""
    body = _body(path, status, message)
    headers = {**_headers(status), "content-length": str(len(body))}
    lines = (f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {text}" for name, text in headers.items()))
    return "\r\n".join((*lines, "", "")).encode() + body


def _headers(status: int) -> dict[str, str]:
    retry = {"retry-after": RETRY_AFTER_S} if status in (429, 503) else {}
    return {"content-type": JSON, "connection": "close", **retry}


def _body(path: str, status: int, message: str) -> bytes:
    return body_for(path, is_anthropic(path), status, message, *_OPENAI_KINDS.get(status, (INVALID_REQUEST, None)))


def body_for(path: str, is_for_anthropic: bool, status: int, message: str, kind: str, code: str | None) -> bytes:
    """The error body in the format of the API of `path`. kind, code: OpenAI's terms"""
    if is_for_anthropic:
        return anthropic_error_body(status, message)
    return openai_error_body(message, kind, code) if is_openai(path) else error_body(message)


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
"""Messages of models about the context length, in vLLM's wording, which clients such as LiteLLM search for."""


class OpenAIError(Exception):
    """An error in the form in which the client gets it."""

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
        """Path of the offending field (`messages[0].role`)."""
        self.code = code
        self.status = status
        """HTTP status."""
        self.kind = kind
        """OpenAI's `type`."""
        self.retry_after = RETRY_AFTER_S
        """Seconds, for the Retry-After header of a 429 or 503."""

    @classmethod
    def of(cls, error: Exception) -> OpenAIError:
        """Logs an unexpected exception and turns it into a 500 without details."""
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
        """The last event of a stream."""
        return b"data: " + self.body() + b"\n\n"


class _AsJson(reprlib.Repr):
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
    """`value` as JSON for a message, truncated."""
    return _AS_JSON.repr(value)


def refuse(param: str, expectation: str, value: object) -> OpenAIError:
    """A 400 that names the field, its value and the expectation."""
    return OpenAIError(f"'{param}' is {as_json(value)}, expected {expectation}", param=param, code="invalid_value")


def requires(param: str, condition: str) -> OpenAIError:
    """A 400 for a field that is set without another field that it requires."""
    return OpenAIError(f"'{param}' requires {condition}", param=param, code="invalid_value")


def missing(param: str) -> OpenAIError:
    """A 400 for a required field that is absent or null."""
    return OpenAIError(f"missing required field '{param}'", param=param, code="missing_required_parameter")


def model_not_found(name: str) -> OpenAIError:
    return OpenAIError(f"The model '{name}' does not exist", param="model", code="model_not_found", status=404)
