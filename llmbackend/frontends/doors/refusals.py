"""What a request presents at a door, and what a closed door says on HTTP: status, headers and body.

For: the doors. Does not know: why. Invariant: under /v1 an error has OpenAI's shape, elsewhere Triton's; no text
repeats what the client sent.
Source: OpenAI's API errors (401 invalid_api_key, 429 rate_limit_exceeded), RFC 6750, Triton's RespondIfRestricted.
"""

from __future__ import annotations

from collections.abc import Mapping

from starlette.responses import Response

from llmbackend.frontends.http_errors import JSON, TEXT, error_body, plain
from llmbackend.frontends.openai.errors import INVALID_REQUEST, OpenAIError

from .rate_limit import Account, Refusal
from .roles import role_needed

NO_KEY = "You didn't provide an API key. Provide it in an Authorization header: 'Authorization: Bearer YOUR_KEY'."
WRONG_KEY = "Incorrect API key provided."


def bearer_token(headers: Mapping[str, bytes]) -> bytes | None:
    """What an Authorization header presents; None without one of the Bearer scheme."""
    scheme, _, token = headers.get("authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def is_openai(path: str) -> bool:
    return path.startswith("/v1/")


def unauthenticated(path: str, has_key: bool) -> Response:
    message = WRONG_KEY if has_key else NO_KEY
    response = _error(path, 401, message, INVALID_REQUEST, "invalid_api_key")
    response.headers["www-authenticate"] = 'Bearer error="invalid_token"' if has_key else "Bearer"
    return response


def restricted(path: str, header: str) -> Response:
    message = f"This API is restricted, expecting header '{header}'"
    if is_openai(path):
        return _error(path, 403, message, "authentication_error", "invalid_auth")
    return plain(error_body(message), 403, TEXT)


def forbidden(path: str, account: Account) -> Response:
    return _error(path, 403, role_needed(account.name, account.role), INVALID_REQUEST, "insufficient_permissions")


def rate_limited(path: str, refusal: Refusal, account: Account) -> Response:
    response = _error(path, 429, refusal.message, refusal.kind, "rate_limit_exceeded")
    response.headers["retry-after"] = refusal.retry_after
    response.raw_headers.extend(account.headers())
    return response


def _error(path: str, status: int, message: str, kind: str, code: str) -> Response:
    if not is_openai(path):
        return plain(error_body(message), status, JSON)
    return OpenAIError(message, status=status, kind=kind, code=code).response()
