"""A stream of server-sent events made again from its record: its request, sent to this host's application once more.

For: StreamCopies. Does not know: what the request says. Invariant: the request runs in the context of the client that
came back, with the record in its scope, until its endpoint has opened the stream; whoever comes back reads it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message

from llmbackend.core.errors import unavailable
from llmbackend.frontends.http.request_scope import PRESENCE, ClientPresence

from .stream_record import RECORDING, Recording, StreamRecord

_SHOWN_BYTES = 400


async def make_again(app: ASGIApp, record: StreamRecord) -> None:
    """Returns when the stream is opened. Raises TritonError UNAVAILABLE when the request is refused here."""
    recording = Recording(record)
    opened = asyncio.get_running_loop().create_future()
    recording.opened = partial(_set, opened)
    refusal = _Refusal()
    serving = asyncio.ensure_future(app(_scope(recording), _Body(record.head.request).receive, refusal.send))
    try:
        await asyncio.wait((serving, opened), return_when=asyncio.FIRST_COMPLETED)
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await serving
    if not opened.done():
        raise unavailable(f"the stream can not be made again here: {refusal.text}")


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _scope(recording: Recording) -> dict[str, Any]:
    assert recording.known is not None
    head = recording.known.head
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": head.path,
        "raw_path": head.path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(head.headers),
        "client": None,
        "server": None,
        PRESENCE: ClientPresence(),
        RECORDING: recording,
    }


class _Body:
    """The body of a request whose client stays."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body or b"", None
        return {"type": "http.request", "body": body, "more_body": False}


class _Refusal:
    """What the application answers in place of a stream."""

    def __init__(self) -> None:
        self._status = 0
        self._body = b""

    @property
    def text(self) -> str:
        return f"{self._status} {self._body[:_SHOWN_BYTES].decode('utf-8', 'replace')}"

    async def send(self, message: Message) -> None:
        self._status = message.get("status", self._status)
        self._body += message.get("body", b"")[:_SHOWN_BYTES]
