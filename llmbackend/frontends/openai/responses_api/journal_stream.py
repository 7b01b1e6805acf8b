"""The events of a response that is made without its client, as a stream: from a journal, behind a given event.

For: responses in the background, and their retrieval. Does not know: what an event says. Invariant: a client gets each
event once, in order, and then the end; an error is the last event.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmbackend.frontends.http.client_disconnect import unless_disconnected
from llmbackend.frontends.journals.documents import StoreError
from llmbackend.frontends.journals.journal import EventsGoneError, Journal

from ..answer_events import QUIET_S, stream_headers
from ..errors import OpenAIError
from ..streams import PING


class JournalStream(Response):
    """A response with the events behind number `after` as its body."""

    def __init__(self, journal: Journal, after: int = -1, headers: Mapping[str, str] | None = None) -> None:
        self.status_code = 200
        self.background = None
        self._journal = journal
        self._after = after
        self.init_headers(stream_headers(headers or {}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(Request(scope, receive), self._send(send))
        except (ClientDisconnect, OSError):
            return

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(_events_of(self._journal, self._after)) as events:
            async for piece in events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events_of(journal: Journal, after: int) -> AsyncGenerator[bytes, None]:
    """Those behind number `after`, as they are committed."""
    try:
        async with aclosing(journal.follow(after, QUIET_S)) as following:
            async for events in following:
                yield b"".join(events.parts) or PING
    except EventsGoneError as error:
        yield OpenAIError(str(error), status=503, kind="server_error", code="events_lost").event()
    except StoreError as error:
        yield OpenAIError.of(error).event()
