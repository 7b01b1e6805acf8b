"""Traces in a file: one JSON array, or numbered files of a few traces each.

For: the trace manager (mode triton). Does not know: requests, which of them are traced. Invariants: at any time a file
is a complete JSON document; when a file cannot be written, an error is logged and no request fails.
Source: Triton's TraceFile and WriteTrace (golden 60).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from .settings import TraceSettings
from .trace import RequestTrace, Trace

log = logging.getLogger(__name__)

MAX_WAITING_BYTES: Final = 1 << 20


class TraceFile:
    """The file at one path, shared by all settings that name it. No descriptor is kept open."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._has_content = False
        self._next_index = 0

    def append(self, items: Iterable[str]) -> None:
        """Adds to the array in the file, which the server's first trace overwrites."""
        text = ",".join(items).encode()
        with self._lock:
            try:
                if not self._has_content:
                    self._path.write_bytes(b"[%b]" % text)
                    self._has_content = True
                    return
                with self._path.open("r+b") as file:
                    file.seek(-1, 2)  # over the closing bracket
                    file.write(b",%b]" % text)
            except OSError as error:
                log.error("failed creating trace file: %s", error)

    def write_numbered(self, items: Iterable[str]) -> None:
        """Writes a separate file, `<path>.<n>`."""
        with self._lock:
            index, self._next_index = self._next_index, self._next_index + 1
        try:
            Path(f"{self._path}.{index}").write_bytes(b"[%b]" % ",".join(items).encode())
        except OSError as error:
            log.error("failed creating trace file: %s", error)


class TraceLog:
    """A TraceSink: collects and writes the traces of one setting.

    Traces that wait to be written take at most MAX_WAITING_BYTES. By design different: Triton keeps traces in memory
    until the server or the setting ends; here they are also written when they exceed MAX_WAITING_BYTES.
    """

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
        """The setting was replaced, or the server stops: writes once the last open trace is complete."""
        with self._lock:
            self._is_retired = True
            due, numbered = self._take_due()
        self._write(due, numbered)

    def _take_due(self) -> tuple[list[str], bool]:
        """What to write now, and whether into a numbered file. Holds the lock."""
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
