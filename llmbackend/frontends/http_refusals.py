"""Refusals that come from the connection and not from a handler, in the shape of the path's protocol.

For: http_protocol and the endpoint. Does not know: why. Invariant: each closes its connection; one that may pass later
says when to try again.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .http_errors import JSON, error_body
from .limits import RETRY_AFTER_S
from .openai.errors import OpenAIError

STOPPING: Final = "Server is stopping"


def refusing(status: int, message: str) -> ASGIApp:
    """An application that answers so."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(_body(scope["path"], status, message), status, _headers(status))(scope, receive, send)

    return app


def refusal_bytes(path: str, status: int, message: str) -> bytes:
    """The same answer as it goes over the wire, for a request that no application has. `path` "": not known yet."""
    body = _body(path, status, message)
    headers = {**_headers(status), "content-length": str(len(body))}
    lines = (f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {text}" for name, text in headers.items()))
    return "\r\n".join((*lines, "", "")).encode() + body


def _headers(status: int) -> dict[str, str]:
    retry = {"retry-after": RETRY_AFTER_S} if status in (429, 503) else {}
    return {"content-type": JSON, "connection": "close", **retry}


def _body(path: str, status: int, message: str) -> bytes:
    if not path.startswith("/v1/"):
        return error_body(message)
    kind, code = _KINDS.get(status, ("invalid_request_error", None))
    return OpenAIError(message, status=status, kind=kind, code=code).body()


_KINDS: Final = {429: ("requests", "rate_limit_exceeded"), 503: ("service_unavailable_error", "unavailable")}
