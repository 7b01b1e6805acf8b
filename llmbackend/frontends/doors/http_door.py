"""The door of the HTTP port: who may enter, what for, and how often.

For: whoever assembles the HTTP application. Does not know: what is behind a path. Invariants: pure ASGI, nothing is
buffered, and a body is not read before its request is admitted; whatever a client sends leaves nothing behind; the
access log holds method, path, status, key's name and time, never a header, a query or a body.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from typing import Final
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import refusals
from .api_keys import KeyRing
from .http_paths import OPEN_PATHS, category_of, is_operators, is_stop
from .rate_limit import Account
from .restrictions import Category, Restrictions
from .roles import Role
from .visit import VISIT, DoorMetrics, Visit

log = logging.getLogger(__name__)
_LOGGED_PATH_CHARACTERS: Final = 200


class HttpDoor:
    """An ASGI application around another one. `keys` None: everybody may enter."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing | None, restrictions: Restrictions, metrics: DoorMetrics, log_requests: bool
    ) -> None:
        self._app = app
        self._keys = keys
        self._restrictions = restrictions
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        entry = _Entry(scope, send)
        try:
            refusal = self._open(entry)
            await (refusal or self._app)(scope, receive, entry.send)
        finally:
            VISIT.set(None)
            if self._log_requests:
                _log(entry)

    def _open(self, entry: _Entry) -> Response | None:
        """The refusal, if there is one; otherwise the visit is on record and the application may go on."""
        path = entry.path
        account: Account | None = None
        if self._keys is not None and path not in OPEN_PATHS:
            key = refusals.bearer_token(entry.headers)
            account = entry.account = None if key is None else self._keys.find(key)
            if account is None:
                self._metrics.decided(None, "http", "unauthenticated")
                return refusals.unauthenticated(path, has_key=key is not None)
        category = category_of(path)
        header = self._restrictions.missing_header(category, entry.headers)
        if header is not None:
            self._metrics.decided(account, "http", "restricted")
            return refusals.restricted(path, header)
        return None if account is None else self._admit(entry, account, category)

    def _admit(self, entry: _Entry, account: Account, category: Category | None) -> Response | None:
        """Roles are asked for first. Limits are on inference; anything else, and stopping one, just passes."""
        if account.role is not Role.OPERATOR and is_operators(entry.path, category):
            self._metrics.decided(account, "http", "forbidden")
            return refusals.forbidden(entry.path, account)
        visit = Visit(account, "http", self._metrics)
        if category is not Category.INFERENCE or is_stop(entry.path):
            self._metrics.decided(account, "http", "accepted")
        else:
            refusal = visit.enter()
            if refusal is not None:
                return refusals.rate_limited(entry.path, refusal, account)
            entry.limited = account
        VISIT.set(visit)
        return None


class _Entry:
    """One request on its way through the door."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.began_s = time.perf_counter()
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers = {name.decode("latin-1"): value for name, value in reversed(scope["headers"])}
        self.account: Account | None = None
        self.limited: Account | None = None
        self.status = 0
        self._send = send

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.limited is not None and (added := self.limited.headers()):
                message = {**message, "headers": [*message["headers"], *added]}
        return self._send(message)


def _log(entry: _Entry) -> None:
    name = "-" if entry.account is None else entry.account.name
    path = quote(entry.path[:_LOGGED_PATH_CHARACTERS])
    elapsed_ms = (time.perf_counter() - entry.began_s) * 1e3
    log.info("%s %s %s key=%s %.1f ms", entry.method, path, entry.status or "-", name, elapsed_ms)
