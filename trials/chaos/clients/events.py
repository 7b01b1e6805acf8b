"""Server-sent events of APIs with named events, and what must stay the same within one answer.

Used by the clients of Responses and Messages. Independent of the events' content. Invariant: a stream that does not end
with its last event ends with an error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from ..outcome import StreamFailed
from .http_transport import lines_of

Event = dict[str, Any]


async def events(answer: httpx.Response, is_last: Callable[[Event], bool]) -> AsyncIterator[Event]:
    """Raises StreamFailed for an error's status, and where the last event does not come."""
    if answer.status_code != 200:
        raise StreamFailed((await answer.aread()).decode(), str(answer.status_code))
    async for line in lines_of(answer):
        if line.startswith("data: {"):
            event: Event = json.loads(line.removeprefix("data: "))
            yield event
            if is_last(event):
                return
    raise StreamFailed("the stream ended without its last event", "connection")


class Identity:
    """What was said once must be said again as it was. Owner: its stream's reader."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def keep(self, name: str, value: Any) -> None:
        if not value or self._seen.setdefault(name, value) != value:
            raise StreamFailed(f"{name} is {value!r}, and was {self._seen.get(name)!r}", "identity")
