"""Metric families on top of pb_utils, written in the background.

Used by TritonBackend. Independent of what is measured. Invariants: a flush brings Triton's /metrics up to date; the
buffer contains one number per series.
"""

from __future__ import annotations

import bisect
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from llmbackend.core.backend_api import MetricKind

logger = logging.getLogger(__name__)

Labels = dict[str, str]
SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
"""(family, sorted labels)"""


class MetricBuffer:
    """All series of one model, and their changes since the last flush. `_lock` guards the changes; `_pb_lock` guards
    the pb_utils objects and is held during calls to Triton.

    A write through pb_utils is a round trip to Triton's process, as expensive as sending a token. A write here only
    changes a number; `flush` sends the totals.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """wake: called when there is something to flush."""
        self._wake = wake
        self._lock = threading.Lock()
        self._pb_lock = threading.Lock()
        self._added: dict[SeriesKey, float] = {}
        self._set: dict[SeriesKey, float] = {}
        self._families: dict[str, Any] = {}
        self._metrics: dict[SeriesKey, Any] = {}
        self.is_served = True
        """False if Triton runs without metrics (--allow-metrics=false)."""

    def family(self, kind: MetricKind, name: str, description: str, buckets: Sequence[float]) -> Scalar | Histogram:
        if kind is MetricKind.HISTOGRAM:
            for part in ("bucket", "sum", "count"):
                self._declare(MetricKind.COUNTER, f"{name}_{part}", description)
            return Histogram(self, name, buckets)
        self._declare(kind, name, description)
        return Scalar(self, name)

    def add(self, name: str, labels: Labels, value: float) -> None:
        key = (name, tuple(sorted(labels.items())))
        with self._lock:
            self._added[key] = self._added.get(key, 0.0) + value
        self._wake()

    def set(self, name: str, labels: Labels, value: float) -> None:
        with self._lock:
            self._set[name, tuple(sorted(labels.items()))] = value
        self._wake()

    def forget(self, name: str, labels: Labels) -> None:
        """Removes the series with these labels, including those with additional labels (a histogram's buckets)."""
        wanted = set(labels.items())
        with self._pb_lock, self._lock:
            for series in (self._added, self._set, self._metrics):
                for key in [key for key in series if key[0] == name and wanted.issubset(key[1])]:
                    del series[key]

    def flush(self) -> None:
        """Sends all changes to Triton."""
        with self._pb_lock:
            with self._lock:
                added, self._added = self._added, {}
                values, self._set = self._set, {}
            if not self.is_served:
                return
            for key, value in added.items():
                metric = self._metric(key)
                if value:
                    metric.increment(value)
            for key, value in values.items():
                self._metric(key).set(value)

    def close(self) -> None:
        """Removes all families. A pb_utils family keeps its metrics until it is itself freed."""
        with self._pb_lock, self._lock:
            self.is_served = False
            self._metrics.clear()
            self._families.clear()

    def _declare(self, kind: MetricKind, name: str, description: str) -> None:
        if not self.is_served or name in self._families:
            return
        pb_kind = pb_utils.MetricFamily.GAUGE if kind is MetricKind.GAUGE else pb_utils.MetricFamily.COUNTER
        try:
            self._families[name] = pb_utils.MetricFamily(name=name, description=description, kind=pb_kind)
        except pb_utils.TritonModelException as error:
            logger.warning("no metrics: %s", error)
            self.is_served = False

    def _metric(self, key: SeriesKey) -> Any:
        metric = self._metrics.get(key)
        if metric is None:
            metric = self._metrics[key] = self._families[key[0]].Metric(labels=dict(key[1]))
        return metric


class Scalar:
    """A counter or a gauge."""

    def __init__(self, buffer: MetricBuffer, name: str) -> None:
        self._buffer = buffer
        self._name = name

    def declare(self, **labels: str) -> None:
        self._buffer.add(self._name, labels, 0.0)

    def increment(self, value: float = 1.0, /, **labels: str) -> None:
        self._buffer.add(self._name, labels, value)

    def set(self, value: float, /, **labels: str) -> None:
        self._buffer.set(self._name, labels, value)

    def remove(self, /, **labels: str) -> None:
        self._buffer.forget(self._name, labels)


class Histogram:
    """The counters of which a Prometheus histogram consists (`<name>_bucket{le}`, `<name>_sum`, `<name>_count`);
    pb_utils' own histogram observes only one value per call."""

    def __init__(self, buffer: MetricBuffer, name: str, buckets: Sequence[float]) -> None:
        self._buffer = buffer
        self._name = name
        self._bounds = (*sorted(buckets), math.inf)
        self._texts = ["+Inf" if math.isinf(bound) else f"{bound:g}" for bound in self._bounds]
        self._seen: set[tuple[str, ...]] = set()

    def declare(self, **labels: str) -> None:
        for text in self._texts:
            self._buffer.add(f"{self._name}_bucket", {**labels, "le": text}, 0.0)
        for part in ("sum", "count"):
            self._buffer.add(f"{self._name}_{part}", labels, 0.0)

    def observe_all(self, values: Sequence[float], /, **labels: str) -> None:
        for value in values:
            self.observe(value, **labels)

    def observe(self, value: float, /, **labels: str) -> None:
        first = bisect.bisect_left(self._bounds, value)
        if tuple(labels.values()) not in self._seen:
            self._seen.add(tuple(labels.values()))
            for text in self._texts[:first]:  # empty buckets are exported too
                self._buffer.add(f"{self._name}_bucket", {**labels, "le": text}, 0.0)
        for text in self._texts[first:]:
            self._buffer.add(f"{self._name}_bucket", {**labels, "le": text}, 1.0)
        self._buffer.add(f"{self._name}_sum", labels, value)
        self._buffer.add(f"{self._name}_count", labels, 1.0)

    def remove(self, /, **labels: str) -> None:
        self._seen.discard(tuple(labels.values()))
        for part in ("bucket", "sum", "count"):
            self._buffer.forget(f"{self._name}_{part}", labels)
