"""Which requests are traced: the settings of the server and of single models, and the counting that samples.

For: the server, which owns the one TraceManager, and frontends, which ask it about each request. Does not know:
protocols, what a trace looks like in the end. Invariants: a request that is not sampled costs one look at one flag
while nothing can be sampled, and one counter under one lock otherwise; a change of settings concerns requests that come
after it; a trace belongs to the setting it was sampled under till its end.
Source: Triton's TraceManager and TraceSetting::SampleTrace, as recorded from Triton 2.51 (golden 41, 60).
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from ..errors import invalid_argument
from .settings import TraceChanges, TraceField, TraceLevel, TraceSettings, changed
from .trace import RequestTrace, Trace, TraceSink
from .trace_file import TraceFile, TraceLog

log = logging.getLogger(__name__)

HeaderLookup = Callable[[str], str | None]
"""A client's header or metadata by its lower-case name."""

_EVERYWHERE: Final = ""
"""Among names of models: the server's own setting."""


class SpanSink(TraceSink, Protocol):
    """What mode opentelemetry needs beside a TraceSink."""

    def parent_of(self, header: HeaderLookup) -> Any | None:
        """The client's own trace, if its headers carry one."""

    def close(self) -> None: ...


class _Sampler:
    """The counting under one state of one setting."""

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
        """Nothing is sampled, whatever comes. (With OpenTelemetry, clients that trace are always joined.)"""
        return not self._joins_clients and not (self._is_able and self._remaining)

    def wants(self, is_forced: bool) -> bool:
        """Whether the request at hand is to be traced."""
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
        """Who (a model, or everywhere) has set what."""
        self._samplers: dict[str, _Sampler] = {}
        self._files: dict[str, TraceFile] = {}
        self._ids = itertools.count(1)
        self._open = 0
        self._is_closed = False
        self._spans: SpanSink | None = None
        self._is_idle = True

    def start(self) -> None:
        """Traces from now on. Raises TritonError UNSUPPORTED when OpenTelemetry is asked for and not installed."""
        if self._defaults.mode == "opentelemetry":
            from .open_telemetry import OpenTelemetrySink

            self._spans = OpenTelemetrySink(self._defaults.open_telemetry)
        _warn_of_what_is_not_traced(self._defaults)
        with self._lock:
            self._replace(_EVERYWHERE, self._defaults)

    @property
    def open_count(self) -> int:
        """Traces that are not complete yet."""
        return self._open

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """No request can be sampled as things are."""
        return self._is_idle

    def sample(self, model_name: str, header: HeaderLookup) -> RequestTrace | None:
        """The trace of a client's request that has just come in; None for all that are not sampled.

        Who gets one gives it to the request, and closes it once the client has its last byte.
        """
        if self._is_idle:
            return None
        sampler = self._samplers.get(model_name) or self._samplers[_EVERYWHERE]
        if sampler.is_idle:
            return None
        parent = self._spans.parent_of(header) if self._spans is not None else None
        if not sampler.wants(is_forced=parent is not None):
            return None
        with self._lock:
            self._open += 1
        level = sampler.settings.level
        if self._spans is not None:
            level &= TraceLevel.TIMESTAMPS  # spans hold no tensors, as in Triton
        return Trace(level, sampler.sink, self._new_id, self._completed, parent).root

    def _new_id(self) -> int:
        return next(self._ids)

    def _completed(self) -> None:
        with self._lock:
            self._open -= 1
            is_over = self._is_closed and not self._open
        if is_over and self._spans is not None:  # sending may take seconds, and this may be an event loop
            threading.Thread(target=self._spans.close, name="trace-close").start()

    # --- settings ---------------------------------------------------------------------------------------------------

    def settings(self, model_name: str = _EVERYWHERE) -> TraceSettings:
        """As they are now; `count` is what is left of it."""
        with self._lock:
            return self._current(model_name if model_name in self._samplers else _EVERYWHERE)

    def update(self, model_name: str, changes: TraceChanges) -> None:
        """Of one model, or, with the empty name, of all that have none of their own.

        Raises TritonError INVALID_ARG for settings that trace, but can not; then nothing changes.
        """
        with self._lock:
            own = changed(self._with_remaining(model_name), changes)
            names = [model_name, *self._own.keys() - {_EVERYWHERE}] if model_name == _EVERYWHERE else [model_name]
            everywhere = own if model_name == _EVERYWHERE else self._with_remaining(_EVERYWHERE)
            server = self._defaults.with_changes(everywhere)
            updated: dict[str, TraceSettings] = {}
            for name in names:
                updated[name] = (
                    server
                    if name == _EVERYWHERE
                    else server.with_changes(own if name == model_name else self._with_remaining(name))
                )
                _check(updated[name])
            self._own[model_name] = own
            for name, settings in updated.items():
                self._replace(name, settings)

    def _current(self, name: str) -> TraceSettings:
        sampler = self._samplers.get(name)
        if sampler is None:
            return self._defaults
        return sampler.settings.with_changes({"count": sampler.remaining})

    def _with_remaining(self, name: str) -> dict[TraceField, Any]:
        """What `name` has set, its count as far as it was used up."""
        own = dict(self._own.get(name, {}))
        if "count" in own and name in self._samplers:
            own["count"] = self._samplers[name].remaining
        return own

    def _replace(self, name: str, settings: TraceSettings) -> None:
        """Counting begins anew. A model that has set nothing has no setting. Holds the lock."""
        before = self._samplers.get(name)
        if name != _EVERYWHERE and not self._own.get(name):
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
        """Samples nothing more and writes what waits; a trace that is still open is written when it is complete."""
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


def _warn_of_what_is_not_traced(settings: TraceSettings) -> None:
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
