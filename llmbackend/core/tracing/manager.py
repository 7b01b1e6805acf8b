"""Decides which requests are traced: trace settings of the server and its models, sampling; and writes the trace file.

While nothing can be sampled, a request costs one flag check, otherwise one counter under one lock. Changed settings
apply to later requests; a trace keeps the setting with which it was sampled. Source: Triton's TraceManager and
TraceSetting::SampleTrace, as recorded from Triton 2.51 (golden 41, 60).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from ..errors import invalid_argument
from .trace import RequestTrace, Trace, TraceChanges, TraceField, TraceLevel, TraceSettings, TraceSink, changed

log = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 1 << 20


class TraceFile:
    """The file at a path, shared by all settings with that path. No descriptor stays open."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._end_bytes = 0
        """Where the closing bracket is; 0: this server has written nothing yet."""
        self._next_index = 0

    def append(self, items: Iterable[str]) -> None:
        """Appends to the array in the file. The server's first trace overwrites the file."""
        text = ",".join(items).encode()
        with self._lock:
            try:
                if not self._is_begun():
                    self._end_bytes = 0
                    self._path.write_bytes(b"[%b]" % text)
                else:
                    self._write_end(b",%b]" % text)
                self._end_bytes += 1 + len(text)
            except OSError as error:
                log.error("failed creating trace file: %s", error)
                if self._end_bytes:
                    with contextlib.suppress(OSError):
                        self._write_end(b"]")  # a full disk may have taken a part of the text

    def _write_end(self, text: bytes) -> None:
        """Replaces what begins with the closing bracket."""
        with self._path.open("r+b") as file:
            file.seek(self._end_bytes)
            file.write(text)
            file.truncate()

    def _is_begun(self) -> bool:
        """Whether it has traces of this server. It may have been moved or emptied since."""
        return self._end_bytes > 0 and self._path.exists() and self._path.stat().st_size > self._end_bytes

    def write_numbered(self, items: Iterable[str]) -> None:
        """Writes a separate file, `<path>.<n>`."""
        with self._lock:
            index, self._next_index = self._next_index, self._next_index + 1
        try:
            Path(f"{self._path}.{index}").write_bytes(b"[%b]" % ",".join(items).encode())
        except OSError as error:
            log.error("failed creating trace file: %s", error)


class TraceLog:
    """A TraceSink that collects and writes the traces of one setting. Deliberate difference: Triton keeps traces in
    memory until the server or the setting ends; here they are also written when they exceed MAX_WAITING_BYTES."""

    takes_spans = False

    def __init__(self, settings: TraceSettings, file: TraceFile) -> None:
        self._settings = settings
        self._file = file
        self._lock = threading.Lock()
        self._open = 0
        self._collected = 0
        self._waiting: list[str] = []
        self._waiting_count = 0
        self._waiting_bytes = 0
        self._is_retired = False

    def begin(self, trace: Trace) -> None:
        with self._lock:
            self._open += 1

    def begin_model(self, report: RequestTrace, start_ns: int) -> None: ...

    def complete(self, trace: Trace) -> None:
        items = list(_items(trace))
        with self._lock:
            self._open -= 1
            self._collected += 1
            self._waiting += items
            self._waiting_count += 1
            self._waiting_bytes += sum(map(len, items))
            due, numbered = self._take_due()
        self._write(due, numbered)

    def retire(self) -> None:
        """Called when the setting is replaced or the server stops: writes once the last open trace is complete."""
        with self._lock:
            self._is_retired = True
            due, numbered = self._take_due()
        self._write(due, numbered)

    def _take_due(self) -> tuple[list[str], bool]:
        """The traces to write now, and whether to write them into a numbered file. Holds the lock."""
        settings = self._settings
        is_full = 0 < settings.log_frequency <= self._waiting_count or self._collected == settings.count
        is_over = self._is_retired and not self._open
        if not (is_full or is_over or self._waiting_bytes > MAX_WAITING_BYTES):
            return [], False
        items, self._waiting = self._waiting, []
        self._waiting_count = self._waiting_bytes = 0
        return items, is_full or settings.log_frequency > 0

    def _write(self, items: list[str], numbered: bool) -> None:
        if items:
            (self._file.write_numbered if numbered else self._file.append)(items)


def _items(trace: Trace) -> Iterator[str]:
    """The JSON objects of a trace: model by model, ordered by time."""
    for report in trace.reports:
        for ns, activity, tensor in sorted(report.items, key=lambda item: item[0]):
            if activity == "REQUEST_START":
                yield _json(_description(report))
            if tensor is None:
                yield f'{{"id":{report.id},"timestamps":[{{"name":"{activity}","ns":{ns}}}]}}'
            else:
                yield _json({"id": report.id, "activity": activity, "tensor": tensor})


def _description(report: RequestTrace) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": report.id,
        "model_name": report.model_name,
        "model_version": report.model_version,
    }
    if report.request_id:
        fields["request_id"] = report.request_id
    if report.parent_id:
        fields["parent_id"] = report.parent_id
    return fields


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


HeaderLookup = Callable[[str], str | None]
"""A client's header or metadata, by lower-case name."""

_SERVER: Final = ""
"""Instead of a model's name: the server."""


class SpanSink(TraceSink, Protocol):
    """A TraceSink for mode opentelemetry."""

    def parent_of(self, header: HeaderLookup) -> Any | None:
        """The client's trace context, if the headers contain one."""

    def close(self) -> None: ...


class _Sampler:
    """Samples requests with one setting, and is replaced when the setting changes."""

    def __init__(self, settings: TraceSettings, sink: TraceSink) -> None:
        self.settings = settings
        self.sink = sink
        self._lock = threading.Lock()
        self._seen = 0
        self._remaining = settings.count
        self._is_able = not settings.fault()
        self._joins_clients = settings.mode == "opentelemetry" and settings.level is not TraceLevel.OFF

    @property
    def remaining(self) -> int:
        return self._remaining

    @property
    def is_idle(self) -> bool:
        """Whether no request can be sampled. (With OpenTelemetry, clients' traces are always continued.)"""
        return not self._joins_clients and not (self._is_able and self._remaining)

    def wants(self, is_forced: bool) -> bool:
        """Counts a request; returns whether to trace it. is_forced: the client traces it."""
        with self._lock:
            if not self._is_able or not self._remaining:
                return is_forced
            self._seen += 1
            is_hit = self._seen % self.settings.rate == 0
            if is_hit and self._remaining > 0:
                self._remaining -= 1
            return is_hit or is_forced


class TraceManager:
    def __init__(self, settings: TraceSettings) -> None:
        self._defaults = settings
        self._lock = threading.RLock()
        self._own: dict[str, dict[TraceField, Any]] = {}
        """By model or _SERVER: the fields that were set for it."""
        self._samplers: dict[str, _Sampler] = {}
        self._files: dict[str, TraceFile] = {}
        self._ids = itertools.count(1)
        self._open = 0
        self._is_closed = False
        self._spans: SpanSink | None = None
        self._is_idle = True

    def start(self) -> None:
        """Raises TritonError UNSUPPORTED if OpenTelemetry is configured but not installed."""
        if self._defaults.mode == "opentelemetry":
            from .open_telemetry import OpenTelemetrySink

            self._spans = OpenTelemetrySink(self._defaults.open_telemetry)
        _warn_if_not_traced(self._defaults)
        with self._lock:
            self._replace(_SERVER, self._defaults)

    @property
    def open_count(self) -> int:
        """Traces that are not complete."""
        return self._open

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request can be sampled at present."""
        return self._is_idle

    def sample(self, model_name: str, header: HeaderLookup) -> RequestTrace | None:
        """The trace for a client's new request; None = not sampled. The caller adds it to the request, and closes it
        after sending the last byte."""
        if self._is_idle:
            return None
        sampler = self._samplers.get(model_name) or self._samplers[_SERVER]
        if sampler.is_idle:
            return None
        parent = self._spans.parent_of(header) if self._spans is not None else None
        if not sampler.wants(is_forced=parent is not None):
            return None
        with self._lock:
            self._open += 1
        level = sampler.settings.level
        if self._spans is not None:
            level &= TraceLevel.TIMESTAMPS  # as in Triton, spans contain no tensors
        return Trace(level, sampler.sink, self._new_id, self._completed, parent).root

    def _new_id(self) -> int:
        return next(self._ids)

    def _completed(self) -> None:
        with self._lock:
            self._open -= 1
            is_over = self._is_closed and not self._open
        if is_over and self._spans is not None:  # on a thread, because sending may take seconds
            threading.Thread(target=self._spans.close, name="trace-close").start()

    # --- settings ---------------------------------------------------------------------------------------------------

    def settings(self, model_name: str = _SERVER) -> TraceSettings:
        """The current settings, with the remaining `count`."""
        with self._lock:
            sampler = self._samplers.get(model_name) or self._samplers.get(_SERVER)
            if sampler is None:
                return self._defaults
            return sampler.settings.with_changes({"count": sampler.remaining})

    def update(self, model_name: str, changes: TraceChanges) -> None:
        """Changes the settings of one model, or of the server ("").

        Raises TritonError INVALID_ARG, without changing anything, for settings with which no request could be traced.
        """
        with self._lock:
            own = {name: self._with_remaining(name) for name in (model_name, _SERVER, *self._own)}
            own[model_name] = changed(own[model_name], changes)
            server = self._defaults.with_changes(own[_SERVER])
            names = own if model_name == _SERVER else [model_name]
            updated = {name: server if name == _SERVER else server.with_changes(own[name]) for name in names}
            for settings in updated.values():
                _check(settings)
            self._own[model_name] = own[model_name]
            for name, settings in updated.items():
                self._replace(name, settings)

    def _with_remaining(self, name: str) -> dict[TraceField, Any]:
        """The fields set for `name`, with the remaining count."""
        own = dict(self._own.get(name, {}))
        if "count" in own and name in self._samplers:
            own["count"] = self._samplers[name].remaining
        return own

    def _replace(self, name: str, settings: TraceSettings) -> None:
        """Replaces a setting and restarts its counters. A model without own fields has no setting. Holds the lock."""
        before = self._samplers.get(name)
        if name != _SERVER and not self._own.get(name):
            self._own.pop(name, None)
            self._samplers.pop(name, None)
        else:
            self._samplers[name] = _Sampler(settings, self._new_sink(settings))
        self._is_idle = self._is_closed or all(sampler.is_idle for sampler in self._samplers.values())
        if before is not None:
            _retire(before.sink)

    def _new_sink(self, settings: TraceSettings) -> TraceSink:
        if self._spans is not None:
            return self._spans
        return TraceLog(settings, self._files.setdefault(settings.file, TraceFile(settings.file)))

    # --- end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stops sampling and writes traces; an open trace is written when it is complete."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = self._is_idle = True
            is_over = not self._open
            sinks = [sampler.sink for sampler in self._samplers.values()]
        for sink in sinks:
            _retire(sink)
        if is_over and self._spans is not None:
            self._spans.close()


def _warn_if_not_traced(settings: TraceSettings) -> None:
    if settings.level is TraceLevel.OFF:
        return
    joins_clients = settings.mode == "opentelemetry" and settings.rate == 0
    if (fault := settings.fault()) and not joins_clients:
        log.warning("requests are not traced: %s", fault)
    if settings.mode == "opentelemetry" and TraceLevel.TENSORS in settings.level:
        log.warning("trace level TENSORS is not available in trace mode opentelemetry")


def _retire(sink: TraceSink) -> None:
    if isinstance(sink, TraceLog):
        sink.retire()


def _check(settings: TraceSettings) -> None:
    fault = settings.fault()
    if fault and settings.level is not TraceLevel.OFF:
        raise invalid_argument(f"Attempting to set invalid trace setting :{fault}")
