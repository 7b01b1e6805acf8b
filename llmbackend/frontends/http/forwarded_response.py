"""A response of another process, sent on as it comes.

For: what passes requests on: the pages' proxy, frontend processes. Does not know: whose response it is. Invariant: no
more of a body is held than the piece that was just read; headers that are about one connection are left out.
"""

from __future__ import annotations

from typing import Final

import httptools
from starlette.types import Send

HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"})


class ForwardedResponse:
    """Reads one response, and sends it on. The methods `on_…` are called by the parser."""

    def __init__(self, send: Send, *, has_body: bool = True, dropped: frozenset[bytes] = HOP_BY_HOP) -> None:
        """has_body: false for HEAD, whose responses announce a body that does not come."""
        self._send = send
        self._has_body = has_body
        self._dropped = dropped
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._head_is_read = False
        self.has_begun = False
        self.is_complete = False

    async def take(self, data: bytes) -> None:
        """Raises ConnectionResetError when `data` is empty, the end of the connection, and HttpParserError."""
        if not data:
            raise ConnectionResetError("the process that answers ended")
        self._parser.feed_data(data)
        if self._head_is_read and not self.has_begun:
            self.has_begun = True
            status = self._parser.get_status_code()
            await self._send({"type": "http.response.start", "status": status, "headers": self._headers})
        if self.has_begun:
            body, self._pieces = b"".join(self._pieces), []
            await self._send({"type": "http.response.body", "body": body, "more_body": not self.is_complete})

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in self._dropped:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head_is_read = True
        self.is_complete = not self._has_body

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True
