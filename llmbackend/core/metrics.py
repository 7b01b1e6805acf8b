"""The nv_* metrics, as collectors of the server's registry.

For: the server, which registers them. Does not know: HTTP, the text format. Invariants: names are Triton's, with no
suffix added; all four failure reasons are always present; values are read at scrape time from the counters that the
statistics RPC reads, so the two can not disagree. Source: Triton's metrics.cc; golden transcripts 10, 34.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import Metric

from .model import LoadedModel
from .statistics import FailureReason, Statistics

Reader = Callable[[Statistics], float]


def _microseconds(ns: int) -> float:
    return ns // 1000


MODEL_METRICS: tuple[tuple[str, str, str, Reader], ...] = (
    (
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        lambda statistics: statistics.success.count,
    ),
    (
        "nv_inference_count",
        "counter",
        "Number of inferences performed (does not include cached requests)",
        lambda statistics: statistics.inference_count,
    ),
    (
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
        lambda statistics: statistics.execution_count,
    ),
    (
        "nv_inference_request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda statistics: _microseconds(statistics.success.ns),
    ),
    (
        "nv_inference_queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda statistics: _microseconds(statistics.queue.ns),
    ),
    (
        "nv_inference_compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda statistics: _microseconds(statistics.compute.compute_input.ns),
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda statistics: _microseconds(statistics.compute.compute_infer.ns),
    ),
    (
        "nv_inference_compute_output_duration_us",
        "counter",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda statistics: _microseconds(statistics.compute.compute_output.ns),
    ),
    (
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda statistics: statistics.pending_count,
    ),
    (
        "nv_model_load_duration_secs",
        "gauge",
        "Model load time in seconds",
        lambda statistics: statistics.load_duration_s,
    ),
)


class ModelMetrics:
    """A collector of one sample per family and serving model version."""

    def __init__(self, models: Callable[[], Iterable[LoadedModel]]) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        for name, kind, description, read in MODEL_METRICS:
            metric = Metric(name, description, kind)
            for model in models:
                metric.add_sample(name, _labels(model), read(model.statistics))
            yield metric
            if name == "nv_inference_request_success":
                yield _failures(models)


def _failures(models: Iterable[LoadedModel]) -> Metric:
    name = "nv_inference_request_failure"
    metric = Metric(name, "Number of failed inference requests, all batch sizes", "counter")
    for model in models:
        for reason in FailureReason:
            labels = {**_labels(model), "reason": reason.value}
            metric.add_sample(name, labels, model.statistics.failures[reason])
    return metric


def _labels(model: LoadedModel) -> dict[str, str]:
    return {"model": model.name, "version": str(model.version)}


class CpuMetrics:
    """A collector of the machine's CPU and memory use; utilisation is the mean since the last scrape."""

    def __init__(self) -> None:
        self._busy, self._total = _cpu_times()
        self._utilization = 0.0

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        busy, total = _cpu_times()
        if total > self._total:
            self._utilization = (busy - self._busy) / (total - self._total)
        self._busy, self._total = busy, total
        memory_total, memory_available = _memory_bytes()
        yield _gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._utilization)
        yield _gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", memory_total)
        yield _gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", memory_total - memory_available)


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
