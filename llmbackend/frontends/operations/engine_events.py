"""GET /v2/engine/events: what the engines do, live, as server-sent events (docs/engine_events.md).

For: the operations router. Does not know: what an engine does, which requests are whose (event_writer.py). Invariants:
events are made on the viewer's own task, never where tokens are delivered; a viewer that does not read loses events and
delays nothing; the state that a stream begins with is older than no event that is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.activity.hub import Viewer
from llmbackend.core.activity.messages import EVENT_KINDS, EventKind
from llmbackend.core.errors import invalid_argument, shown
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import RecentLog

from ..errors import PermissionDeniedError
from ..http.event_stream import EventStream
from ..http.routing import Endpoints, Json, get
from .event_writer import EventWriter

PATH: Final = "/v2/engine/events"
DEFAULT_KINDS: Final[frozenset[EventKind]] = EVENT_KINDS - {"log", "blocks"}
DEFAULT_INTERVAL_MS: Final = 100
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 50, 5000
QUIET_S: Final = 15.0
"""Without an event for so long, a comment is sent, so that proxies keep the connection."""
MANY_ENTRIES: Final = 200
"""More of them are written on a thread: a viewer's own events are some 20 µs each."""
_PING: Final = b": ping\n\n"
_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
_KIND_NAMES: Final = ", ".join(sorted(EVENT_KINDS))
_PARAMETERS: Final[list[Json]] = [
    {
        "name": "model",
        "in": "query",
        "description": "Models to show; default: all.",
        "schema": {"type": "array", "items": {"type": "string", "minLength": 1}},
    },
    {
        "name": "kinds",
        "in": "query",
        "description": f"Events, separated by commas: {_KIND_NAMES}. Default: all but `blocks` and `log`.",
        "schema": {"type": "array", "items": {"enum": sorted(EVENT_KINDS)}, "minItems": 1},
        "style": "form",
        "explode": False,
    },
    {
        "name": "interval_ms",
        "in": "query",
        "description": "Interval in which events are collected.",
        "schema": {
            "type": "integer",
            "minimum": MIN_INTERVAL_MS,
            "maximum": MAX_INTERVAL_MS,
            "default": DEFAULT_INTERVAL_MS,
        },
    },
]


@dataclass(frozen=True, slots=True)
class EventsQuery:
    """What a viewer asks for. models: empty = all."""

    kinds: frozenset[EventKind]
    models: frozenset[str]
    interval_s: float

    @classmethod
    def parse(cls, query: Mapping[str, list[str]]) -> EventsQuery:
        """Raises TritonError INVALID_ARG naming the field, its value and what was expected."""
        for name in query:
            if name not in ("model", "kinds", "interval_ms"):
                raise invalid_argument(f"query parameter {shown(name)} is unknown, expected model, kinds, interval_ms")
        models = frozenset(query.get("model", ()))
        if "" in models:
            raise invalid_argument("query parameter 'model' is empty, expected the name of a model")
        return cls(_kinds(query.get("kinds")), models, _interval_ms(query.get("interval_ms")) / 1e3)


def _kinds(given: list[str] | None) -> frozenset[EventKind]:
    if given is None:
        return DEFAULT_KINDS
    found: set[EventKind] = set()
    for text in given:
        for name in text.split(","):
            known: EventKind | None = next((kind for kind in EVENT_KINDS if kind == name), None)
            if known is None:
                raise invalid_argument(f"query parameter 'kinds' has {shown(name)}, expected {_KIND_NAMES}")
            found.add(known)
    return frozenset(found)


def _interval_ms(given: list[str] | None) -> int:
    if given is None:
        return DEFAULT_INTERVAL_MS
    text = given[-1]
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_INTERVAL_MS))
    if not is_number or not MIN_INTERVAL_MS <= int(text) <= MAX_INTERVAL_MS:
        raise invalid_argument(
            f"query parameter 'interval_ms' is {shown(text)}, "
            f"expected a whole number from {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}"
        )
    return int(text)


class EngineEventsEndpoint(Endpoints):
    def __init__(self, server: InferenceServer, log: RecentLog, *, allows_kill: bool) -> None:
        self._server = server
        self._log = log
        log.follow(server.report_log)
        self._allows_kill = allows_kill

    @get(
        PATH,
        parameters=_PARAMETERS,
        response_class=Response,
        streams="Server-sent events; the first one is `snapshot`.",
    )
    async def events(self, request: Request) -> Response:
        """What the engines do, live: steps, requests, engine and model states. A key's holder sees its own requests"""
        query = EventsQuery.parse({name: request.query_params.getlist(name) for name in request.query_params})
        wakeup = _Wakeup()
        viewer = self._server.watch(query.kinds, wakeup.set)
        if viewer.key_name is not None and "log" in query.kinds:
            viewer.close()
            raise PermissionDeniedError(
                "query parameter 'kinds' has 'log', which requires an API key with role 'operator'"
            )
        feed = _Feed(self._server, self._log, viewer, wakeup, query, self._allows_kill)
        return EventStream(feed.pieces(), _HEADERS, on_close=viewer.close)


class _Wakeup:
    """Wakes a task of this event loop, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> bool:
        """Whether it was set in time."""
        try:
            async with asyncio.timeout(timeout_s):  # wait_for would make a task each time
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class _Feed:
    """The events of `viewer`."""

    def __init__(
        self,
        server: InferenceServer,
        log: RecentLog,
        viewer: Viewer,
        wakeup: _Wakeup,
        query: EventsQuery,
        allows_kill: bool,
    ) -> None:
        self._server = server
        self._log = log
        self._viewer = viewer
        self._wakeup = wakeup
        self._interval_s = query.interval_s
        self._writer = EventWriter(query.kinds, query.models, viewer.key_name)
        self._allows_kill = allows_kill

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        viewer = self._viewer
        yield await asyncio.to_thread(self._snapshot)
        while not viewer.is_over:
            viewer.sleep()
            if not await self._wakeup.wait(QUIET_S):
                yield _PING
                continue
            await asyncio.sleep(self._interval_s)
            entries, num_dropped = viewer.read()
            if num_dropped:
                viewer.skip()
                yield self._writer.dropped(viewer.position, num_dropped + len(entries))
                yield await asyncio.to_thread(self._snapshot)
            elif len(entries) > MANY_ENTRIES:
                yield await asyncio.to_thread(self._writer.events, viewer.position, entries)
            elif piece := self._writer.events(viewer.position, entries):
                yield piece
        entries, _ = viewer.read()
        yield self._writer.events(viewer.position, entries)

    def _snapshot(self) -> bytes:
        """With the log's lines so far behind it. Events that were reported while it is made follow it, though it may
        count them."""
        position, server = self._viewer.position, self._server.server_metadata()
        facts: dict[str, Any] = {
            "time": time.time(),
            "server": {"name": server.name, "version": server.version},
            "scope": "all" if self._viewer.key_name is None else "own",
            "allows_kill": self._allows_kill,
        }
        snapshot = self._writer.snapshot(position, facts, self._server.describe_instances())
        return snapshot + self._writer.log_lines(position, self._log.lines())
