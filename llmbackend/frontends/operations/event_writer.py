"""The events of `/v2/engine/events` as bytes: collected by instance, and without what the viewer may not see.

For: engine_events.py. Does not know: connections, when events are sent. Invariants: a viewer with a key gets the number
of no request but its own, and no reason of a failure; within one call an instance's requests are received before its
steps, and end behind them; what changes an instance's or a model's state stays in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import orjson

from llmbackend.core.activity.hub import Entry, Source
from llmbackend.core.activity.messages import (
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
from llmbackend.core.server_log import LogLine

_RECEIVED: Final = len(b'{"received":[')
_ENDED: Final = len(b'{"ended":')
_decoders: Final[dict[type, Callable[[bytes], Any]]] = {
    kind: msgspec.json.Decoder(kind).decode
    for kind in (RequestsReceived, RequestEnded, StepActivity, BlocksActivity, EngineActivity, ModelActivity)
}


@dataclass(slots=True)
class _OfInstance:
    """Events of one instance, as JSON."""

    steps: list[bytes] = field(default_factory=list)
    ended: list[bytes] = field(default_factory=list)
    blocks: bytes = b""
    """The latest ones."""


class _Collected:
    """Events of instances between two that stay in their place."""

    def __init__(self) -> None:
        self._received: list[tuple[Source, list[bytes]]] = []
        """In order: a request may be received by one instance and taken by another."""
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
        """As events; nothing is left."""
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
    """Of one viewer."""

    def __init__(self, kinds: frozenset[EventKind], models: frozenset[str], key_name: str | None) -> None:
        """models: those that are shown; empty = all. key_name: whose requests alone are shown; None = all."""
        self._kinds = kinds
        self._models = models
        self._key_name = key_name
        self._own: set[int] = set()
        """With a key: the requests that are shown."""

    def snapshot(
        self, position: str, facts: dict[str, Any], instances: Iterable[tuple[Source, InstanceDescription]]
    ) -> bytes:
        """facts: what it holds beside the instances"""
        shown = [(source, self._visible(one)) for source, one in instances if self._shows(source)]
        self._own = {request.request for _, one in shown for request in one.requests} if self._key_name else set()
        described = b",".join([_prefix(source) + to_json(one)[1:] for source, one in shown])
        return _event("snapshot", position, b'%b,"instances":[%b]}' % (orjson.dumps(facts)[:-1], described))

    def log_lines(self, position: str, lines: Iterable[LogLine]) -> bytes:
        """As the events that they would have been; nothing where the log is not watched."""
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

    def _visible(self, instance: InstanceDescription) -> InstanceDescription:
        if self._key_name is None:
            return instance
        return msgspec.structs.replace(instance, requests=self._own_requests(instance.requests))

    def _own_requests(self, requests: Iterable[RequestActivity]) -> tuple[RequestActivity, ...]:
        return tuple(request for request in requests if request.key == self._key_name)

    def _data(self, entry: Entry) -> bytes | None:
        """The event's JSON with what the viewer may see of it; None = nothing."""
        if self._key_name is None:
            return entry.data
        decode = _decoders.get(entry.event)
        seen = self._seen(decode(entry.data)) if decode is not None else entry.data
        return seen if seen is None or isinstance(seen, bytes) else to_json(seen)

    def _seen(self, event: Any) -> Any:
        """What a key's holder may see of an event. Every kind of event passes here, also those that are not shown:
        they say which requests are whose."""
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
    """What an event is about, as far as it is about one thing."""
    named = {"model": source.model, "version": source.version, "instance": source.instance}
    return {name: value for name, value in named.items() if value}


def _prefix(source: Source) -> bytes:
    """The beginning of an object that more members follow."""
    named = orjson.dumps(_named(source))
    return named[:-1] + b"," if len(named) > 2 else b"{"


def _event(name: str, position: str, data: bytes) -> bytes:
    return b"event: %b\nid: %b\ndata: %b\n\n" % (name.encode(), position.encode(), data)
