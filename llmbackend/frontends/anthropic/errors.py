"""Errors in the shape that Anthropic's clients parse.

For: the router and streams. Does not know: what went wrong: it gets the errors of the OpenAI frontend, whose request
path it shares. Invariant: for every failure the client gets `{"type": "error", "error": {"type", "message"},
"request_id"}`, as a response body or, once a stream has begun, as its last event.
Source: Anthropic's API reference for types and statuses.
"""

from __future__ import annotations

from typing import Final

from starlette.responses import Response

from ..http.errors import anthropic_error_body
from ..http.openai_errors import OpenAIError
from ..http.responses import JSON

REQUEST_ID: Final = "request-id"
"""The header by which an operator finds a request again."""
_OVERLOADED: Final = 529
_RETRIED: Final = (429, _OVERLOADED)


class UnsupportedThreadError(OpenAIError):
    """A request about a thread: a conversation that the server keeps. Anthropic's clients send the whole conversation
    again when an error has these details."""

    details: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}

    def __init__(self) -> None:
        message = "'thread' is not supported: this server stores no conversations; send all messages"
        super().__init__(message, param="thread", code="unsupported_parameter")


def status_of(error: OpenAIError) -> int:
    """Anthropic says 529 where others say 503."""
    return _OVERLOADED if error.status == 503 else error.status


def error_response(error: OpenAIError, request_id: str) -> Response:
    status = status_of(error)
    headers = {REQUEST_ID: request_id} | ({"Retry-After": error.retry_after} if status in _RETRIED else {})
    details = error.details if isinstance(error, UnsupportedThreadError) else None
    body = anthropic_error_body(status, error.message, request_id, details)
    return Response(body, status, headers, media_type=JSON)


def error_event(error: OpenAIError, request_id: str) -> bytes:
    return b"event: error\ndata: %b\n\n" % anthropic_error_body(status_of(error), error.message, request_id)
