"""GET /v2/engine/events: the engines' activity as server-sent events (docs/engine_events.md).

Invariants: events are written on the viewer's task, never where tokens are delivered. A viewer that does not read loses
events and delays nothing. Each event is either in the first snapshot or follows it. A viewer with a key sees only the
numbers of its own requests, and no failure reasons. Within one call, an instance's requests are received before its
steps and end after them. State changes of an instance or a model stay in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from llmbackend.core.activity.hub import Entry, Source, Viewer
from llmbackend.core.activity.messages import (
    EVENT_KINDS,
    KIND_OF,
    BlocksActivity,
    EngineActivity,
    EventKind,
    InstanceDescription,
    ModelActivity,
    RequestActivity,
    RequestEnded,
    RequestsReceived,
    StepActivity,
    to_json,
)
from llmbackend.core.errors import invalid_argument, shown
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_log import LogLine, RecentLog

from ..errors import PermissionDeniedError
from ..http.event_stream import EventStream
from ..http.routing import Endpoints, Json, get, whole_number

_RECEIVED: Final = len(b'{"received":[')
_ENDED: Final = len(b'{"ended":')
_decoders: Final[dict[type, Callable[[bytes], Any]]] = {
    kind: msgspec.json.Decoder(kind).decode
    for kind in (RequestsReceived, RequestEnded, StepActivity, BlocksActivity, EngineActivity, ModelActivity)
}


@dataclass(slots=True)
class _OfInstance:
    steps: list[bytes] = field(default_factory=list)
    ended: list[bytes] = field(default_factory=list)
    blocks: bytes = b""
    """The latest block map."""


class _Collected:
    """Events of instances between two state changes."""

    def __init__(self) -> None:
        self._received: list[tuple[Source, list[bytes]]] = []
        """In order of arrival: one instance may receive a request that another takes."""
        self._of: dict[Source, _OfInstance] = {}

    def add(self, entry: Entry, data: bytes) -> None:
        if entry.event is RequestsReceived:
            if not self._received or self._received[-1][0] != entry.source:
                self._received.append((entry.source, []))
            self._received[-1][1].append(data[_RECEIVED:-2])
            return
        of = self._of.setdefault(entry.source, _OfInstance())
        if entry.event is StepActivity:
            of.steps.append(data)
        elif entry.event is RequestEnded:
            of.ended.append(data[_ENDED:-1])
        else:
            of.blocks = data

    def take(self, position: str) -> list[bytes]:
        """Returns the events, and removes them."""
        received, self._received = self._received, []
        instances, self._of = self._of, {}
        parts = [
            _event("requests", position, b'%b"received":[%b],"ended":[]}' % (_prefix(source), b",".join(requests)))
            for source, requests in received
        ]
        for source, of in instances.items():
            prefix = _prefix(source)
            if of.steps:
                parts.append(_event("steps", position, b'%b"steps":[%b]}' % (prefix, b",".join(of.steps))))
            if of.blocks:
                parts.append(_event("blocks", position, prefix + of.blocks[1:]))
            if of.ended:
                data = b'%b"received":[],"ended":[%b]}' % (prefix, b",".join(of.ended))
                parts.append(_event("requests", position, data))
        return parts


class EventWriter:
    """Writes the events for one viewer."""

    def __init__(self, kinds: frozenset[EventKind], models: frozenset[str], key_name: str | None) -> None:
        """models: empty: all. key_name: whose requests are shown; None: everyone's"""
        self._kinds = kinds
        self._models = models
        self._key_name = key_name
        self._own: set[int] = set()
        """For viewers with a key: the numbers of their own requests."""

    def snapshot(
        self, position: str, facts: dict[str, Any], instances: Iterable[tuple[Source, InstanceDescription]]
    ) -> bytes:
        """facts: additional members"""
        shown = [(source, one) for source, one in instances if self._shows(source)]
        if self._key_name is not None:
            replace = msgspec.structs.replace
            shown = [(source, replace(one, requests=self._own_requests(one.requests))) for source, one in shown]
            self._own = {request.request for _, one in shown for request in one.requests}
        described = b",".join([_prefix(source) + to_json(one)[1:] for source, one in shown])
        return _event("snapshot", position, b'%b,"instances":[%b]}' % (orjson.dumps(facts)[:-1], described))

    def log_lines(self, position: str, lines: Iterable[LogLine]) -> bytes:
        if "log" not in self._kinds:
            return b""
        return b"".join(_event("log", position, orjson.dumps(line)) for line in lines)

    def dropped(self, position: str, count: int) -> bytes:
        return _event("dropped", position, orjson.dumps({"events": count}))

    def events(self, position: str, entries: Iterable[Entry]) -> bytes:
        parts: list[bytes] = []
        collected = _Collected()
        for entry in entries:
            kind = KIND_OF[entry.event]
            if not self._shows(entry.source) or (data := self._data(entry)) is None or kind not in self._kinds:
                continue
            if kind in ("requests", "steps", "blocks"):
                collected.add(entry, data)
                continue
            parts += collected.take(position)
            parts.append(_event(kind, position, _prefix(entry.source) + data[1:]))
        return b"".join(parts + collected.take(position))

    def _shows(self, source: Source) -> bool:
        return not self._models or not source.model or source.model in self._models

    def _own_requests(self, requests: Iterable[RequestActivity]) -> tuple[RequestActivity, ...]:
        return tuple(request for request in requests if request.key == self._key_name)

    def _data(self, entry: Entry) -> bytes | None:
        """The event's JSON with what the viewer may see; None: nothing."""
        if self._key_name is None:
            return entry.data
        decode = _decoders.get(entry.event)
        seen = self._seen(decode(entry.data)) if decode is not None else entry.data
        return seen if seen is None or isinstance(seen, bytes) else to_json(seen)

    def _seen(self, event: Any) -> Any:
        """What the holder of a key may see of an event. Must also be called for events that are not shown: they say
        which requests belong to the key."""
        own = self._own
        if isinstance(event, RequestsReceived):
            received = self._own_requests(event.received)
            own.update(request.request for request in received)
            return RequestsReceived(received) if received else None
        if isinstance(event, RequestEnded):
            is_own = event.ended.request in own
            own.discard(event.ended.request)
            return event if is_own else None
        if isinstance(event, StepActivity):
            return msgspec.structs.replace(
                event,
                rows=tuple(row for row in event.rows if row[0] in own),
                preempted=tuple(request for request in event.preempted if request in own),
                waiting=tuple(one for one in event.waiting if one[0] in own),
            )
        if isinstance(event, BlocksActivity):
            runs = tuple((*run[:3], run[3] if run[3] in own else None, run[4]) for run in event.runs)
            return msgspec.structs.replace(event, runs=runs)
        return msgspec.structs.replace(event, reason="")


def _named(source: Source) -> dict[str, str]:
    named = {"model": source.model, "version": source.version, "instance": source.instance}
    return {name: value for name, value in named.items() if value}


def _prefix(source: Source) -> bytes:
    """The beginning of a JSON object, to be continued with more members."""
    named = orjson.dumps(_named(source))
    return named[:-1] + b"," if len(named) > 2 else b"{"


def _event(name: str, position: str, data: bytes) -> bytes:
    return b"event: %b\nid: %b\ndata: %b\n\n" % (name.encode(), position.encode(), data)


PATH: Final = "/v2/engine/events"
DEFAULT_KINDS: Final[frozenset[EventKind]] = EVENT_KINDS - {"log", "blocks"}
DEFAULT_INTERVAL_MS: Final = 100
MIN_INTERVAL_MS, MAX_INTERVAL_MS = 50, 5000
QUIET_S: Final = 15.0
"""Silence after which a comment is sent, so that proxies keep the connection open."""
MANY_ENTRIES: Final = 200
"""From this number on, entries are written on a thread: events for a key take about 20 µs each."""
_PING: Final = b": ping\n\n"
_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}
_KIND_NAMES: Final = ", ".join(sorted(EVENT_KINDS))
_MODELS: Final = {"type": "array", "items": {"type": "string", "minLength": 1}}
_KINDS: Final = {"type": "array", "items": {"enum": sorted(EVENT_KINDS)}, "minItems": 1}
_INTERVAL: Final = {"minimum": MIN_INTERVAL_MS, "maximum": MAX_INTERVAL_MS, "default": DEFAULT_INTERVAL_MS}
_KINDS_TEXT: Final = f"Events, separated by commas: {_KIND_NAMES}. Default: all but `blocks` and `log`."
_PARAMETERS: Final[list[Json]] = [
    {"in": "query", **parameter}
    for parameter in (
        {"name": "model", "description": "Models to show; default: all.", "schema": _MODELS},
        {"name": "kinds", "description": _KINDS_TEXT, "schema": _KINDS, "style": "form", "explode": False},
        {
            "name": "interval_ms",
            "description": "Interval in which events are collected.",
            "schema": {"type": "integer", **_INTERVAL},
        },
    )
]


@dataclass(frozen=True, slots=True)
class EventsQuery:
    kinds: frozenset[EventKind]
    models: frozenset[str]
    """Empty: all."""
    interval_s: float

    @classmethod
    def parse(cls, query: Mapping[str, list[str]]) -> EventsQuery:
        """Raises TritonError INVALID_ARG naming field, value and expectation."""
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
    interval_ms = whole_number(given[-1], MIN_INTERVAL_MS, MAX_INTERVAL_MS)
    if interval_ms is None:
        raise invalid_argument(
            f"query parameter 'interval_ms' is {shown(given[-1])}, "
            f"expected a whole number from {MIN_INTERVAL_MS} to {MAX_INTERVAL_MS}"
        )
    return interval_ms


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
        """Live steps, requests, engine and model states. The holder of a key sees only its own requests"""
        query = EventsQuery.parse({name: request.query_params.getlist(name) for name in request.query_params})
        wakeup = _Wakeup()
        viewer = self._server.watch(query.kinds, wakeup.set)
        if viewer.key_name is not None and "log" in query.kinds:
            viewer.close()
            raise PermissionDeniedError(
                "query parameter 'kinds' has 'log', which requires an API key with role 'operator'"
            )
        writer = EventWriter(query.kinds, query.models, viewer.key_name)
        feed = _Feed(self._server, self._log, viewer, wakeup, writer, query.interval_s, self._allows_kill)
        return EventStream(feed.pieces(), _HEADERS, on_close=viewer.close)


class _Wakeup:
    """Wakes a task of this event loop from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> bool:
        """Returns False on timeout."""
        try:
            async with asyncio.timeout(timeout_s):  # wait_for would create a task each time
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


@dataclass(frozen=True, slots=True)
class _Feed:
    server: InferenceServer
    log: RecentLog
    viewer: Viewer
    wakeup: _Wakeup
    writer: EventWriter
    interval_s: float
    allows_kill: bool

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        viewer, writer = self.viewer, self.writer
        yield await asyncio.to_thread(self._snapshot)
        while not viewer.is_over:
            viewer.sleep()
            if not await self.wakeup.wait(QUIET_S):
                yield _PING
                continue
            await asyncio.sleep(self.interval_s)
            entries, num_dropped = viewer.read()
            if num_dropped:
                viewer.skip()
                yield writer.dropped(viewer.position, num_dropped + len(entries))
                yield await asyncio.to_thread(self._snapshot)
            elif len(entries) > MANY_ENTRIES:
                yield await asyncio.to_thread(writer.events, viewer.position, entries)
            elif piece := writer.events(viewer.position, entries):
                yield piece
        entries, _ = viewer.read()
        yield writer.events(viewer.position, entries)

    def _snapshot(self) -> bytes:
        """The snapshot, then the log lines so far. Events reported meanwhile follow it, even if it already includes
        them."""
        position, server = self.viewer.position, self.server.server_metadata()
        facts: dict[str, Any] = {
            "time": time.time(),
            "server": {"name": server.name, "version": server.version},
            "scope": "all" if self.viewer.key_name is None else "own",
            "allows_kill": self.allows_kill,
        }
        snapshot = self.writer.snapshot(position, facts, self.server.describe_instances())
        return snapshot + self.writer.log_lines(position, self.log.lines())
