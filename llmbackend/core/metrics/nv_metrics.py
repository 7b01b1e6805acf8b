"""The nv_* metrics of models and of the machine, as collectors for the server's registry.

Invariants: names are Triton's, without an added suffix; all four failure reasons are present; values are read at scrape
time from the counters behind the statistics RPC. There are no GPU metrics.
Source: Triton's metrics.cc; golden transcripts 10, 34.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from .metric_family import number_text
from .metrics_options import MetricsOptions
from .model_metrics import FIRST_RESPONSE, FIRST_RESPONSE_DESCRIPTION, FailureReason, Latencies, Statistics, Summary

MODEL_READY = "llmbackend:model_ready"


@dataclass(frozen=True, slots=True)
class VersionReadiness:
    """Whether one model version serves. namespace: "" without namespaces."""

    model: str
    version: int
    namespace: str
    is_ready: bool


Readinesses = Callable[[], Iterable[VersionReadiness]]


def register_host_metrics(registry: CollectorRegistry, readinesses: Readinesses) -> None:
    """Also registers the standard process metrics: process_cpu_seconds_total, process_open_fds …"""
    registry.register(ReadinessMetric(readinesses))
    ProcessCollector(registry=registry)


class ReadinessMetric:
    """One sample for each known model version that was not unloaded."""

    def __init__(self, readinesses: Readinesses) -> None:
        self._readinesses = readinesses

    def collect(self) -> Iterator[Metric]:
        metric = Metric(MODEL_READY, "1: the model version takes requests; 0: it loads, has failed or hangs.", "gauge")
        for each in self._readinesses():
            labels = {"model": each.model, "version": str(each.version)}
            if each.namespace:
                labels["namespace"] = each.namespace
            metric.add_sample(MODEL_READY, labels, float(each.is_ready))
        if metric.samples:
            yield metric


class ServedModel(Protocol):
    """A model version that has metrics."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def namespace(self) -> str: ...
    @property
    def metric_tags(self) -> Mapping[str, str]: ...
    @property
    def statistics(self) -> Statistics: ...
    @property
    def latencies(self) -> Latencies: ...


Models = Callable[[], Iterable[ServedModel]]


MODEL_METRICS: dict[str, tuple[str, str]] = {
    "nv_inference_request_success": ("success.count", "Number of successful inference requests, all batch sizes"),
    "nv_inference_count": ("inference_count", "Number of inferences performed (does not include cached requests)"),
    "nv_inference_exec_count": (
        "execution_count",
        "Number of model executions performed (does not include cached requests)",
    ),
    "nv_inference_request_duration_us": (
        "success.ns",
        "Cumulative inference request duration in microseconds (includes cached requests)",
    ),
    "nv_inference_queue_duration_us": (
        "queue.ns",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
    ),
    "nv_inference_compute_input_duration_us": (
        "compute.input_ns",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
    ),
    "nv_inference_compute_infer_duration_us": (
        "compute.infer_ns",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
    ),
    "nv_inference_compute_output_duration_us": (
        "compute.output_ns",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
    ),
    "nv_cache_num_hits_per_model": ("cache_hit.count", "Number of cache hits per model"),
    "nv_cache_hit_duration_per_model": ("cache_hit.ns", "Total cache hit duration per model, in microseconds"),
    "nv_cache_num_misses_per_model": ("cache_miss.count", "Number of cache misses per model"),
    "nv_cache_miss_duration_per_model": (
        "cache_miss.ns",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
    ),
    "nv_inference_pending_request_count": (
        "pending_count",
        "Instantaneous number of pending requests awaiting execution per-model.",
    ),
    "nv_model_load_duration_secs": ("load_duration_s", "Model load time in seconds"),
}
"""Name → field of Statistics (nanoseconds are shown as microseconds) and description."""
GAUGES = frozenset({"nv_inference_pending_request_count", "nv_model_load_duration_secs"})
LATENCY_COUNTERS = frozenset(name for name in MODEL_METRICS if name.endswith(("_duration_us", "_per_model")))
"""Families that `--metrics-config counter_latencies=false` switches off."""


def register_metrics(registry: CollectorRegistry, models: Models, options: MetricsOptions) -> None:
    """Registers the collectors in Triton's order: counters, gauges, histograms, summaries."""
    registry.register(ModelMetrics(models, options))
    registry.register(PinnedMemoryMetrics())
    if options.cpu_metrics:
        registry.register(CpuMetrics(options))
    if options.histogram_latencies:
        registry.register(FirstResponseMetrics(models))
    if options.summary_latencies:
        registry.register(SummaryMetrics(models, options))


class ModelMetrics:
    """One sample per family and READY model version. Families without samples are omitted."""

    def __init__(self, models: Models, options: MetricsOptions) -> None:
        self._models = models
        self._hidden = frozenset() if options.counter_latencies else LATENCY_COUNTERS

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        for name, (field, description) in MODEL_METRICS.items():
            if name in self._hidden:
                continue
            metric = Metric(name, description, "gauge" if name in GAUGES else "counter")
            for model in models:
                if model.statistics.is_cached or not name.startswith("nv_cache_"):
                    value = attrgetter(field)(model.statistics)
                    metric.add_sample(name, labels_of(model), value // 1000 if field.endswith("ns") else value)
            if metric.samples:
                yield metric
            if name == "nv_inference_request_success":
                yield _failures(models)


def _failures(models: Iterable[ServedModel]) -> Metric:
    name = "nv_inference_request_failure"
    metric = Metric(name, "Number of failed inference requests, all batch sizes", "counter")
    for model in models:
        for reason in FailureReason:
            labels = {**labels_of(model), "reason": reason.value}
            metric.add_sample(name, labels, model.statistics.failures[reason])
    return metric


def labels_of(model: ServedModel) -> dict[str, str]:
    labels = {"model": model.name, "version": str(model.version), **model.metric_tags}
    return labels | {"namespace": model.namespace} if model.namespace else labels


SUMMARIES: dict[str, tuple[str, str]] = {
    "nv_inference_request_summary_us": (
        "request",
        "Summary of inference request duration in microseconds (includes cached requests)",
    ),
    "nv_inference_queue_summary_us": (
        "queue",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
    ),
    "nv_inference_compute_input_summary_us": (
        "compute_input",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
    ),
    "nv_inference_compute_infer_summary_us": (
        "compute_infer",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
    ),
    "nv_inference_compute_output_summary_us": (
        "compute_output",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
    ),
    "nv_cache_hit_summary_per_model": ("cache_hit", "Summary of cache hit duration per model, in microseconds"),
    "nv_cache_miss_summary_per_model": (
        "cache_miss",
        "Summary of cache miss (insert+lookup) duration per model, in microseconds",
    ),
}
"""Name → field of Summaries and description."""
WITHOUT_CACHE = frozenset({"nv_inference_request_summary_us"})
"""Not shown for models with a cache: as in Triton, this duration would not include the time to store the response."""
WITH_CACHE = frozenset({"nv_cache_hit_summary_per_model", "nv_cache_miss_summary_per_model"})


class FirstResponseMetrics:
    """The histogram of the time to the first response."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        metric = Metric(FIRST_RESPONSE, FIRST_RESPONSE_DESCRIPTION, "histogram")
        for model in self._models():
            histogram = model.latencies.first_response
            for sample in histogram.collect().samples if histogram is not None else ():
                metric.add_sample(sample.name, {**labels_of(model), **sample.labels}, sample.value)
        if metric.samples:
            yield metric


class SummaryMetrics:
    """The latency summaries of every model."""

    def __init__(self, models: Models, options: MetricsOptions) -> None:
        self._models = models
        self._quantiles = [quantile.quantile for quantile in options.summary_quantiles]

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        for name, (field, description) in SUMMARIES.items():
            metric = Metric(name, description, "summary")
            for model in models:
                hidden = WITHOUT_CACHE if model.statistics.is_cached else WITH_CACHE
                if model.latencies.summaries is not None and name not in hidden:
                    self._add(metric, labels_of(model), getattr(model.latencies.summaries, field))
            if metric.samples:
                yield metric

    def _add(self, metric: Metric, labels: Mapping[str, str], summary: Summary) -> None:
        count, total, values = summary.snapshot(self._quantiles)
        metric.add_sample(f"{metric.name}_count", dict(labels), count)
        metric.add_sample(f"{metric.name}_sum", dict(labels), total)
        for quantile, value in zip(self._quantiles, values, strict=True):
            metric.add_sample(metric.name, {**labels, "quantile": number_text(quantile)}, value)


class PinnedMemoryMetrics:
    """Always zero: dashboards expect both names, but this host has no pinned memory."""

    def collect(self) -> Iterator[Metric]:
        yield _gauge("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", 0)
        yield _gauge("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", 0)


class _Reading(NamedTuple):
    """The machine's load at one moment."""

    time_s: float
    """Monotonic."""
    busy_ticks: float
    """Busy time of all processors since boot."""
    total_ticks: float
    memory_total_bytes: int
    memory_available_bytes: int

    @classmethod
    def now(cls) -> _Reading:
        return cls(time.monotonic(), *_cpu_times(), *memory_bytes())


class CpuMetrics:
    """The machine's CPU and memory usage, at most `--metrics-interval-ms` old; read only during scrapes."""

    def __init__(self, options: MetricsOptions) -> None:
        self._interval_s = options.interval_ms / 1000
        self._last = _Reading.now()
        self._utilization = 0.0

    def collect(self) -> Iterator[Metric]:
        if time.monotonic() >= self._last.time_s + self._interval_s:
            self._read()
        total, available = self._last.memory_total_bytes, self._last.memory_available_bytes
        yield _gauge("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._utilization)
        yield _gauge("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total)
        yield _gauge("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", total - available)

    def _read(self) -> None:
        last, self._last = self._last, _Reading.now()
        if self._last.total_ticks > last.total_ticks:
            self._utilization = (self._last.busy_ticks - last.busy_ticks) / (self._last.total_ticks - last.total_ticks)


def _gauge(name: str, description: str, value: float) -> Metric:
    metric = Metric(name, description, "gauge")
    metric.add_sample(name, {}, value)
    return metric


def _cpu_times() -> tuple[float, float]:
    """(busy, total) ticks of all processors since boot; (0, 0) if /proc/stat cannot be read."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return 0.0, 0.0
    total = sum(ticks)
    return float(total - ticks[3] - ticks[4]), float(total)


def memory_bytes() -> tuple[int, int]:
    """(total, available) in bytes."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
    except OSError:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page_bytes, os.sysconf("SC_AVPHYS_PAGES") * page_bytes
    return _kib_field(fields["MemTotal"]), _kib_field(fields["MemAvailable"])


def _kib_field(text: str) -> int:
    return int(text.split()[0]) * 1024
