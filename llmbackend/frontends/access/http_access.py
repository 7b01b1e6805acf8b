"""Access control of the HTTP port: API keys, restricted APIs, roles and rate limits, before the application.

For: the frontend server. Does not know: what is behind a path. Invariants: pure ASGI, nothing is buffered, and a body
is not read before its request is admitted; nothing is kept of a request that has ended; the access log holds method,
path, status, key name and time, and the labels that a request gives itself (`user`), never a header, a query or
another part of a body; no refusal repeats what the client sent.
Source: OpenAI's API errors (401 invalid_api_key, 429 rate_limit_exceeded), RFC 6750, Triton's RespondIfRestricted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from typing import Final
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..http.errors import INVALID_REQUEST, anthropic_error_body, error_body, is_anthropic, is_openai, openai_error_body
from ..http.request_scope import LABELS
from ..http.responses import JSON, TEXT, plain
from .api_keys import NO_KEY, NO_KEY_ANTHROPIC, WRONG_KEY, KeyRing, presented_key
from .permissions import (
    OPEN_PATHS,
    Category,
    Restrictions,
    Role,
    begins_no_inference,
    category_of,
    needs_operator,
    role_needed,
)
from .rate_limit import Account, Refusal
from .request_identity import REQUEST_IDENTITY, AccessMetrics, RequestIdentity

log = logging.getLogger(__name__)
_LOGGED_PATH_CHARACTERS: Final = 200


class HttpAccess:
    """An ASGI application around another one. Without `keys` every client is admitted."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing | None, restrictions: Restrictions, metrics: AccessMetrics, log_requests: bool
    ) -> None:
        self._app = app
        self._keys = keys
        self._restrictions = restrictions
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = _CheckedRequest(scope, send)
        try:
            refusal = self._check(request)
            await (refusal or self._app)(scope, receive, request.send)
        finally:
            REQUEST_IDENTITY.set(None)
            if self._log_requests:
                _log(request)

    def _check(self, request: _CheckedRequest) -> Response | None:
        """The refusal, or None: then the request's identity is set and the application may go on."""
        path = request.path
        account: Account | None = None
        if self._keys is not None and path not in OPEN_PATHS:
            key = presented_key(request.headers, is_anthropic=request.is_anthropic)
            account = request.account = None if key is None else self._keys.find(key)
            if account is None:
                self._metrics.decided(None, "http", "unauthenticated")
                return _unauthenticated(request, has_key=key is not None)
        category = category_of(path)
        header = self._restrictions.missing_header(category, request.headers)
        if header is not None:
            self._metrics.decided(account, "http", "restricted")
            return _restricted(request, header)
        return None if account is None else self._admit(request, account, category)

    def _admit(self, request: _CheckedRequest, account: Account, category: Category | None) -> Response | None:
        """Checks the role first. Rate limits apply to what begins an inference."""
        if account.role is not Role.OPERATOR and needs_operator(request.path, category):
            self._metrics.decided(account, "http", "forbidden")
            return _forbidden(request, account)
        identity = RequestIdentity(account, "http", self._metrics)
        if category is not Category.INFERENCE or begins_no_inference(request.path):
            self._metrics.decided(account, "http", "accepted")
        else:
            refusal = identity.take_first()
            if refusal is not None:
                return _rate_limited(request, refusal, account)
            request.limited = account
        REQUEST_IDENTITY.set(identity)
        return None


class _CheckedRequest:
    """One request: what is checked of it, and what the access log says about it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.began_s = time.perf_counter()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value for name, value in reversed(scope["headers"])}
        self.is_anthropic = is_anthropic(self.path, self.headers.get("anthropic-version"))
        self.account: Account | None = None
        self.limited: Account | None = None
        self.status = 0
        self.scope = scope
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.limited is not None and (added := self.limited.headers()):
                message = {**message, "headers": [*message["headers"], *added]}
        return self._send(message)


def _log(request: _CheckedRequest) -> None:
    name = "-" if request.account is None else request.account.name
    path = quote(request.path[:_LOGGED_PATH_CHARACTERS])
    elapsed_ms = (time.perf_counter() - request.began_s) * 1e3
    labels = request.scope.get(LABELS, "")
    log.info("%s %s %s key=%s %.1f ms%s", request.method, path, request.status or "-", name, elapsed_ms, labels)


def _unauthenticated(request: _CheckedRequest, has_key: bool) -> Response:
    message = WRONG_KEY if has_key else NO_KEY_ANTHROPIC if request.is_anthropic else NO_KEY
    response = _error(request, 401, message, INVALID_REQUEST, "invalid_api_key")
    response.headers["www-authenticate"] = 'Bearer error="invalid_token"' if has_key else "Bearer"
    return response


def _restricted(request: _CheckedRequest, header: str) -> Response:
    message = f"This API is restricted, expecting header '{header}'"
    if is_openai(request.path):
        return _error(request, 403, message, "authentication_error", "invalid_auth")
    return plain(error_body(message), 403, TEXT)


def _forbidden(request: _CheckedRequest, account: Account) -> Response:
    message = role_needed(account.name, account.role)
    return _error(request, 403, message, INVALID_REQUEST, "insufficient_permissions")


def _rate_limited(request: _CheckedRequest, refusal: Refusal, account: Account) -> Response:
    response = _error(request, 429, refusal.message, refusal.kind, "rate_limit_exceeded")
    response.headers["retry-after"] = refusal.retry_after
    response.raw_headers.extend(account.headers())
    return response


def _error(request: _CheckedRequest, status: int, message: str, kind: str, code: str) -> Response:
    """In the shape of the request's API; `kind` and `code` are OpenAI's."""
    if request.is_anthropic:
        body = anthropic_error_body(status, message)
    elif is_openai(request.path):
        body = openai_error_body(message, kind, code)
    else:
        body = error_body(message)
    return plain(body, status, JSON)
