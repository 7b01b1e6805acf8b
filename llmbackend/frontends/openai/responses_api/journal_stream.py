"""The events of a response that is made without its client, as a stream: from a journal, behind a given event.

For: responses in the background, and their retrieval. Does not know: what an event says. Invariant: a client gets each
event once, in order, and then the end; an error is the last event.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from llmbackend.frontends.http.event_stream import EventStream
from llmbackend.frontends.journals.documents import StoreError
from llmbackend.frontends.journals.journal import EventsGoneError, Journal

from ..answer_events import QUIET_S, stream_headers
from ..errors import OpenAIError
from ..streams import PING


def journal_stream(journal: Journal, after: int = -1, headers: Mapping[str, str] | None = None) -> EventStream:
    """A response with the events behind number `after` as its body."""
    return EventStream(_events_of(journal, after), stream_headers(headers or {}))


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
