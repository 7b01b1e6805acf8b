"""Errors on HTTP: which status a Triton code has, and the one shape an error body has.

For: every KServe handler. Does not know: requests, models. Invariant: an error body is always `{"error": "<text>"}`,
also under content type text/plain, which Triton sends where its handler had set no type yet (health, the checks
before an /infer body).
Source: Triton's HttpCodeFromError; content types as recorded from Triton 2.51.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from llmbackend.core.errors import ErrorCode, TritonError

from .limits import RETRY_AFTER_S, LimitReachedError, PermissionDeniedError

JSON: Final = "application/json"
TEXT: Final = "text/plain"

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

ErrorHandler = Callable[[Request, Exception], Awaitable[Response]]

_PLAIN_405 = re.compile(r"/(live|ready|infer|metrics)/?$")
"""Paths whose handlers refuse a method before they set a content type."""


def plain(
    content: bytes = b"", status: int = 200, content_type: str = TEXT, headers: Mapping[str, str] | None = None
) -> Response:
    """A response whose content type is exactly `content_type` (Starlette alone would add a charset)."""
    return Response(content, status, {"content-type": content_type, **(headers or {})})


def error_body(message: str) -> bytes:
    """`{"error": message}`; characters that are no Unicode text (a backend's message may hold any) become '?'."""
    return orjson.dumps({"error": message.encode("utf-8", "replace").decode()})


def error_response(error: TritonError, content_type: str = JSON, headers: Mapping[str, str] | None = None) -> Response:
    """`error` as a response with the status of its code; a refusal that may pass later says when to try again."""
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


def install_error_handlers(app: FastAPI) -> None:
    """Makes `app` answer a raised TritonError, an unknown path, a wrong method and a bug of ours in Triton's shape."""
    for kind, handler in _FORESEEN:
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, _on_bug)


async def error_answer(request: Request, error: Exception) -> tuple[Response, Exception | None]:
    """What such an app answers to `error`, and the error once more if it is a bug that has to be raised after that."""
    for kind, handler in _FORESEEN:
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
    return plain(status=400)  # nobody is left to read it


async def _on_bug(request: Request, error: Exception) -> Response:
    """The traceback goes to the log (the error is raised again after this response), not to the client."""
    return plain(error_body("internal error, see the server's log"), 500, JSON)


_FORESEEN: Final[tuple[tuple[type[Exception], ErrorHandler], ...]] = (
    (TritonError, _on_triton_error),
    (HTTPException, _on_http_exception),
    (ClientDisconnect, _on_disconnect),
)
