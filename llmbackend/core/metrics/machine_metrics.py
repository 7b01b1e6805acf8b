"""Metrics of the machine: CPU, memory, and the pool of pinned memory that this host does not have.

For: the server's registry. Does not know: models. Invariants: nothing is read while nobody asks; an answer is at most
`--metrics-interval-ms` old, and the CPU's utilisation is the mean of at least that time. Source: Triton's metrics.cc,
which reads on a thread of its own; golden transcript 10. There are no metrics of GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import Metric

from .metrics_options import MetricsOptions


class PinnedMemoryMetrics:
    """A collector. Dashboards expect both names; a host without device memory has no use for pinned memory."""

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield _gauge("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", 0)
        yield _gauge("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", 0)


class _Reading(NamedTuple):
    """Seconds of all processors since boot, and bytes; `time_s` is monotonic."""

    time_s: float
    busy_s: float
    total_s: float
    memory_total: int
    memory_available: int

    @classmethod
    def now(cls) -> _Reading:
        return cls(time.monotonic(), *_cpu_times(), *_memory_bytes())


class CpuMetrics:
    """A collector of the machine's CPU and memory use."""

    def __init__(self, options: MetricsOptions) -> None:
        self._interval_s = options.interval_ms / 1000
        self._last = _Reading.now()
        self._utilization = 0.0

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if time.monotonic() >= self._last.time_s + self._interval_s:
            self._read()
        total, available = self._last.memory_total, self._last.memory_available
        yield _gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._utilization)
        yield _gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total)
        yield _gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", total - available)

    def _read(self) -> None:
        last, self._last = self._last, _Reading.now()
        if self._last.total_s > last.total_s:
            self._utilization = (self._last.busy_s - last.busy_s) / (self._last.total_s - last.total_s)


def _gauge(name: str, description: str, value: float) -> Metric:
    metric = Metric(name, description, "gauge")
    metric.add_sample(name, {}, value)
    return metric


def _cpu_times() -> tuple[float, float]:
    """(busy, total) seconds of all processors since boot; (0, 0) where the system does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return 0.0, 0.0
    total = sum(ticks)
    return float(total - ticks[3] - ticks[4]), float(total)


def _memory_bytes() -> tuple[int, int]:
    """(total, available)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page_bytes, os.sysconf("SC_AVPHYS_PAGES") * page_bytes
    return _kib_field(fields["MemTotal"]), _kib_field(fields["MemAvailable"])


def _kib_field(text: str) -> int:
    return int(text.split()[0]) * 1024
