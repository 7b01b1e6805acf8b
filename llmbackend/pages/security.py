"""SecurityHeaders: the content security policy and related headers of every response of the page process.

Used by main.py. Independent of what a page shows. Invariants: only this server's scripts run: its files, and the page's
inline scripts, which carry a nonce of the response; a script in a model's text would not run even if the sanitiser
missed it. Nothing is loaded from or sent to other hosts.

NiceGUI needs `unsafe-eval`: it compiles templates in the browser and runs scripts that the page process sends over the
websocket. `unsafe-inline` is only for styles, which Quasar sets on elements.
"""

from __future__ import annotations

import re
import secrets
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_POLICY: Final = (
    "default-src 'none'; script-src 'self' 'unsafe-eval' 'nonce-{nonce}'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; manifest-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
)
_OTHERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_SCRIPT: Final = re.compile(rb"<script(?=[\s>])")


class SecurityHeaders:
    """ASGI middleware. Buffers HTML responses: page shells of about 100 kB without text of models or viewers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Marked(send).send)


class _Marked:
    """Sends one response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._nonce = secrets.token_urlsafe(16)
        self._start: dict[str, Any] | None = None
        """Delayed start of an HTML response, whose length is not known yet."""
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_page(self._start)

    async def _begin(self, message: Message) -> None:
        headers = MutableHeaders(raw=message["headers"])
        headers.update({**_OTHERS, "content-security-policy": _POLICY.format(nonce=self._nonce)})
        if headers.get("content-type", "").startswith("text/html"):
            self._start = {**message}
        else:
            await self._send(message)

    async def _send_page(self, start: dict[str, Any]) -> None:
        body = _SCRIPT.sub(b'<script nonce="%b"' % self._nonce.encode(), self._body)
        headers = MutableHeaders(raw=start["headers"])
        headers["content-length"] = str(len(body))
        headers["cache-control"] = "no-store"
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})
